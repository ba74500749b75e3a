/**
 * Weights of an ONNX file, read and replaced without decoding the rest.
 *
 * Fields are walked by `@bufbuild/protobuf/wire`. All but the replaced tensors is copied as bytes, so
 * no schema is needed, and what later versions of ONNX add to the format stays as it is.
 */
import { BinaryReader, BinaryWriter, WireType } from "@bufbuild/protobuf/wire";

import { OnnxgradError, printedShape } from "./errors.js";
import { bytesOf, type Dtype, type HostTensor } from "./tensors.js";

// numbers of fields in onnx.proto
const MODEL = { graph: 7 };
const GRAPH = { node: 1, initializer: 5, input: 11 };
const NODE = { output: 2, operator: 4, attribute: 5 };
const ATTRIBUTE = { name: 1, tensor: 5 };
const TENSOR = { dims: 1, dtype: 2, name: 8, raw: 9, doc: 12 };

const DATA_TYPES: Partial<Record<number, Dtype>> = {
  1: "float32", 2: "uint8", 3: "int8", 4: "uint16", 5: "int16", 6: "int32", 7: "int64",
  9: "bool", 11: "float64", 12: "uint32", 13: "uint64",
}; // prettier-ignore

/** Return what replaces a field: other bytes, null to leave it out, undefined to keep it. */
type Change = (field: number, bytes: Uint8Array) => Uint8Array | null | undefined;

/** Return a model whose initializers and `Constant` nodes of these names hold these tensors. */
export function withTensors(model: Uint8Array, tensors: ReadonlyMap<string, HostTensor>): { model: Uint8Array; found: Set<string> } {
  const found = new Set<string>();
  const changed = rewriteConstants(model, (name, old) => {
    const tensor = tensors.get(name);
    if (!tensor) return undefined;
    requireAlike(name, old, tensor);
    found.add(name);
    return written(old, name, tensor);
  });
  return { model: changed, found };
}

/** Return a model in which the constants of these names are inputs instead. */
export function withInputs(model: Uint8Array, tensors: ReadonlyMap<string, HostTensor>): { model: Uint8Array; found: Set<string> } {
  const found = new Set<string>();
  const inputs: Uint8Array[] = [];
  const emptied = rewriteConstants(model, (name, old) => {
    const tensor = tensors.get(name);
    if (!tensor) return undefined;
    requireAlike(name, old, tensor);
    found.add(name);
    inputs.push(valueInfo(name, old));
    return null;
  });
  const added = rewrite(emptied, (field, graph) => {
    if (field !== MODEL.graph) return undefined;
    const stated = new Set<string>(); // models of old versions state initializers as inputs too
    rewrite(graph, (f, bytes) => void (f === GRAPH.input && stated.add(text(bytes, 1))));
    const writer = new BinaryWriter().raw(graph);
    for (const info of inputs) if (!stated.has(text(info, 1))) writer.tag(GRAPH.input, WireType.LengthDelimited).bytes(info);
    return writer.finish();
  });
  return { model: added, found };
}

/** Change the tensors of the main graph: initializers, and the values of `Constant` nodes. */
function rewriteConstants(model: Uint8Array, change: (name: string, tensor: Uint8Array) => Uint8Array | null | undefined): Uint8Array {
  return rewrite(model, (field, graph) => {
    if (field !== MODEL.graph) return undefined;
    return rewrite(graph, (field, bytes) => {
      if (field === GRAPH.initializer) return change(text(bytes, TENSOR.name), bytes);
      if (field === GRAPH.node && text(bytes, NODE.operator) === "Constant") return constantNode(bytes, change);
      return undefined;
    });
  });
}

function constantNode(node: Uint8Array, change: (name: string, tensor: Uint8Array) => Uint8Array | null | undefined): Uint8Array | null {
  const name = text(node, NODE.output);
  let removed = false;
  const changed = rewrite(node, (field, attribute) => {
    if (field !== NODE.attribute || text(attribute, ATTRIBUTE.name) !== "value") return undefined;
    return rewrite(attribute, (field, tensor) => {
      if (field !== ATTRIBUTE.tensor) return undefined;
      const replaced = change(name, tensor);
      removed ||= replaced === null;
      return replaced;
    });
  });
  return removed ? null : changed;
}

function requireAlike(name: string, old: Uint8Array, tensor: HostTensor): void {
  const { dims, dataType } = described(old);
  const dtype = DATA_TYPES[dataType];
  if (dtype !== tensor.dtype || dims.join() !== tensor.shape.join())
    throw new OnnxgradError(`"${name}" is ${dtype ?? `of data type ${dataType}`} ${printedShape(dims)} in the model, but ${tensor.dtype} ${printedShape(tensor.shape)} in the state: save the state, and merge it by \`onnxgrad merge\``);
}

/** Return the dims and the data type of a TensorProto. */
function described(tensor: Uint8Array): { dims: number[]; dataType: number } {
  const dims: number[] = [];
  let dataType = 0;
  const reader = new BinaryReader(tensor);
  while (reader.pos < reader.len) {
    const [field, wire] = reader.tag();
    if (field === TENSOR.dims && wire === WireType.LengthDelimited) {
      const packed = new BinaryReader(reader.bytes());
      while (packed.pos < packed.len) dims.push(Number(packed.int64()));
    } else if (field === TENSOR.dims) dims.push(Number(reader.int64()));
    else if (field === TENSOR.dtype) dataType = reader.int32();
    else reader.skip(wire, field);
  }
  return { dims, dataType };
}

/** Return a TensorProto with the dims, data type and description of another, and other elements. */
function written(old: Uint8Array, name: string, tensor: HostTensor): Uint8Array {
  const { dims, dataType } = described(old);
  const writer = new BinaryWriter();
  for (const length of dims) writer.tag(TENSOR.dims, WireType.Varint).int64(length);
  writer.tag(TENSOR.dtype, WireType.Varint).int32(dataType);
  const own = text(old, TENSOR.name); // that of a `Constant` may differ from its output
  if (own) writer.tag(TENSOR.name, WireType.LengthDelimited).string(own);
  const doc = text(old, TENSOR.doc);
  if (doc) writer.tag(TENSOR.doc, WireType.LengthDelimited).string(doc);
  if (tensor.data.byteLength !== dims.reduce((n, length) => n * length, tensor.data.BYTES_PER_ELEMENT))
    throw new OnnxgradError(`"${name}" has ${tensor.data.length} elements, its shape is ${printedShape(dims)}`);
  return writer.tag(TENSOR.raw, WireType.LengthDelimited).bytes(bytesOf(tensor.data)).finish();
}

/** Return the ValueInfoProto of a tensor: name = 1, type = 2 {tensor_type = 1 {elem_type = 1, shape = 2}}. */
function valueInfo(name: string, tensor: Uint8Array): Uint8Array {
  const { dims, dataType } = described(tensor);
  const shape = new BinaryWriter();
  for (const length of dims) shape.tag(1, WireType.LengthDelimited).bytes(new BinaryWriter().tag(1, WireType.Varint).int64(length).finish());
  const type = new BinaryWriter().tag(1, WireType.Varint).int32(dataType).tag(2, WireType.LengthDelimited).bytes(shape.finish());
  const info = new BinaryWriter().tag(1, WireType.LengthDelimited).string(name);
  return info.tag(2, WireType.LengthDelimited).bytes(new BinaryWriter().tag(1, WireType.LengthDelimited).bytes(type.finish()).finish()).finish();
}

/** Return a message with some of its length-delimited fields changed; the others are copied. */
function rewrite(message: Uint8Array, change: Change): Uint8Array {
  const reader = new BinaryReader(message);
  const writer = new BinaryWriter();
  while (reader.pos < reader.len) {
    const begin = reader.pos;
    const [field, wire] = reader.tag();
    const bytes = wire === WireType.LengthDelimited ? reader.bytes() : (reader.skip(wire, field), undefined);
    const changed = bytes && change(field, bytes);
    if (changed === null) continue;
    if (changed) writer.tag(field, WireType.LengthDelimited).bytes(changed);
    else writer.raw(message.subarray(begin, reader.pos));
  }
  return writer.finish();
}

/** Return the last value of a field of text, "" if there is none. */
function text(message: Uint8Array, wanted: number): string {
  const reader = new BinaryReader(message);
  let value = "";
  while (reader.pos < reader.len) {
    const [field, wire] = reader.tag();
    if (field === wanted && wire === WireType.LengthDelimited) value = reader.string();
    else reader.skip(wire, field);
  }
  return value;
}
