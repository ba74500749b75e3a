/**
 * Files of named tensors: https://github.com/huggingface/safetensors. The npm registry has no
 * well-kept package that reads and writes them.
 */
import { OnnxgradError } from "./errors.js";
import { arrayOf, bytesOf, bytesPerElement, numel, type Dtype, type HostTensor } from "./tensors.js";

const DTYPES: Record<string, Dtype> = {
  F32: "float32",
  F64: "float64",
  I8: "int8",
  U8: "uint8",
  I16: "int16",
  U16: "uint16",
  I32: "int32",
  U32: "uint32",
  I64: "int64",
  U64: "uint64",
  BOOL: "bool",
};
const LETTERS = Object.fromEntries(Object.entries(DTYPES).map(([letters, dtype]) => [dtype, letters]));

export interface TensorFile {
  tensors: Map<string, HostTensor>;
  metadata: Record<string, string>;
}

/** Return the tensors and metadata of a file; tensors share its memory where they are aligned. */
export function readSafetensors(bytes: Uint8Array): TensorFile {
  const damaged = (why: string) => new OnnxgradError(`this is no complete safetensors file (${why}): save or download it again`);
  if (bytes.byteLength < 8) throw damaged(`${bytes.byteLength} bytes`);
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  const size = Number(view.getBigUint64(0, true));
  if (size > bytes.byteLength - 8) throw damaged(`its header has ${size} bytes, the file ${bytes.byteLength}`);
  let header: Record<string, { dtype: string; shape: number[]; data_offsets: [number, number] }>;
  try {
    header = JSON.parse(new TextDecoder("utf-8", { fatal: true }).decode(bytes.subarray(8, 8 + size)));
  } catch (error) {
    throw damaged(`its header is not JSON: ${(error as Error).message}`);
  }
  const { __metadata__: metadata = {}, ...entries } = header as Record<string, any>;
  const tensors = new Map<string, HostTensor>();
  for (const [name, entry] of Object.entries(entries)) {
    const dtype = DTYPES[entry?.dtype];
    if (!dtype) throw new OnnxgradError(`the tensor "${name}" has the dtype ${entry?.dtype}, which clients in JavaScript do not read: use float32 or float64`);
    const [begin, end] = entry.data_offsets ?? [];
    const length = numel(entry.shape) * bytesPerElement(dtype);
    if (!(begin >= 0 && end - begin === length && 8 + size + end <= bytes.byteLength))
      throw damaged(`the tensor "${name}" lies outside`);
    tensors.set(name, { dtype, shape: entry.shape, data: arrayOf(dtype, bytes.subarray(8 + size + begin, 8 + size + end)) });
  }
  return { tensors, metadata };
}

/** Return the bytes of a file; the wider elements come first, so that all are aligned. */
export function writeSafetensors({ tensors, metadata }: TensorFile): Uint8Array {
  const ordered = [...tensors].sort(([, a], [, b]) => bytesPerElement(b.dtype) - bytesPerElement(a.dtype));
  let end = 0;
  const entries = ordered.map(([name, { dtype, shape, data }]) => {
    return [name, { dtype: LETTERS[dtype], shape, data_offsets: [end, (end += data.byteLength)] }];
  });
  const header = Object.fromEntries([["__metadata__", metadata], ...entries]);
  const json = new TextEncoder().encode(JSON.stringify(header));
  const begin = 8 + Math.ceil(json.length / 8) * 8;
  const bytes = new Uint8Array(begin + end);
  bytes.fill(0x20, 8, begin); // the header is padded by spaces
  new DataView(bytes.buffer).setBigUint64(0, BigInt(begin - 8), true);
  bytes.set(json, 8);
  let at = begin;
  for (const [, { data }] of ordered) {
    bytes.set(bytesOf(data), at);
    at += data.byteLength;
  }
  return bytes;
}
