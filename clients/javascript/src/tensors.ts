import { OnnxgradError, printedShape } from "./errors.js";

const ARRAYS = {
  float32: Float32Array,
  float64: Float64Array,
  int8: Int8Array,
  uint8: Uint8Array,
  int16: Int16Array,
  uint16: Uint16Array,
  int32: Int32Array,
  uint32: Uint32Array,
  int64: BigInt64Array,
  uint64: BigUint64Array,
  bool: Uint8Array,
};

/** The dtypes of tensors, as ONNX and onnxruntime call them. */
export type Dtype = keyof typeof ARRAYS;
export type TypedArray = InstanceType<(typeof ARRAYS)[Dtype]>;

/** An array of numbers with its shape, in row-major order. */
export interface HostTensor {
  readonly dtype: Dtype;
  readonly shape: readonly number[];
  readonly data: TypedArray;
}

/** What the manifest says of a tensor; a string or null stands for any length. */
export interface TensorSpec {
  readonly name: string;
  readonly dtype: Dtype;
  readonly shape: readonly (number | string | null)[];
}

/** That of an input, whose shape is null if it may have any number of axes. */
export type InputSpec = Omit<TensorSpec, "shape"> & { readonly shape: TensorSpec["shape"] | null };

type Elements = TypedArray | readonly (number | bigint | boolean)[];

/** What a batch may hold for an input: elements alone, or with their shape (a tensor of `ort` too). */
export type Value = Elements | { readonly data: unknown; readonly shape?: readonly number[]; readonly dims?: readonly number[]; readonly type?: string };

/** Lengths of the symbols of a batch, and the input that each was read from. */
export type Symbols = Map<string, { length: number; input: string }>;

export function isDtype(dtype: string): dtype is Dtype {
  return Object.hasOwn(ARRAYS, dtype);
}

export function numel(shape: readonly number[]): number {
  return shape.reduce((product, length) => product * length, 1);
}

/** Return bytes as an array of a dtype; it shares their memory if they are aligned. */
export function arrayOf(dtype: Dtype, bytes: Uint8Array): TypedArray {
  const type = ARRAYS[dtype];
  const count = bytes.byteLength / type.BYTES_PER_ELEMENT;
  const aligned = bytes.byteOffset % type.BYTES_PER_ELEMENT === 0 ? bytes : bytes.slice();
  return new type(aligned.buffer as ArrayBuffer, aligned.byteOffset, count);
}

export function bytesPerElement(dtype: Dtype): number {
  return ARRAYS[dtype].BYTES_PER_ELEMENT;
}

export function bytesOf(data: TypedArray): Uint8Array {
  return new Uint8Array(data.buffer, data.byteOffset, data.byteLength);
}

/** Return a number as a tensor of shape []. */
export function scalar(value: number, dtype: Dtype): HostTensor {
  return { dtype, shape: [], data: converted([value], dtype, "a scalar") };
}

export function isFiniteEverywhere(data: TypedArray): boolean {
  if (!(data instanceof Float32Array || data instanceof Float64Array)) return true;
  let sum = 0; // x * 0 is 0 for every finite x, and NaN for others: faster than a test of each
  for (let i = 0; i < data.length; i++) sum += data[i]! * 0;
  return sum === 0;
}

/** Return what was passed for an input as a tensor of its dtype and shape, or throw. */
export function accepted(input: InputSpec, value: Value, symbols: Symbols): HostTensor {
  const { elements, shape: stated, type } = taken(input, value);
  if (!input.shape && !stated) throw new OnnxgradError(`input "${input.name}" takes any shape: pass {data, shape}`);
  const spec = { ...input, shape: input.shape ?? stated!.map(() => null) };
  const wanted = `${spec.dtype} ${printedShape(spec.shape)}`;
  if (type !== undefined && type !== spec.dtype)
    throw new OnnxgradError(`input "${spec.name}" takes ${wanted}, not a tensor of ${type}: convert it`);
  const data = converted(elements, spec.dtype, `input "${spec.name}", which takes ${wanted},`);
  const shape = stated ?? inferred(spec, data.length, symbols);
  const fits =
    shape.length === spec.shape.length &&
    spec.shape.every((length, i) => typeof length !== "number" || length === shape[i]);
  if (!fits)
    throw new OnnxgradError(`input "${spec.name}" takes the shape ${printedShape(spec.shape)}, not ${printedShape(shape)}: reshape or pad what you pass`);
  if (numel(shape) !== data.length)
    throw new OnnxgradError(`input "${spec.name}" has ${data.length} elements, but its shape ${printedShape(shape)} holds ${numel(shape)}: pass all elements of the batch in one flat array`);
  if (data.length === 0)
    throw new OnnxgradError(`input "${spec.name}" is empty: pass at least one row`);
  noteSymbols(spec, shape, symbols);
  return { dtype: spec.dtype, shape, data };
}

function taken(spec: InputSpec, value: Value): { elements: Elements; shape?: readonly number[]; type?: string } {
  if (Array.isArray(value) || ArrayBuffer.isView(value)) return { elements: value as Elements };
  const held = value as Exclude<Value, Elements> | null | undefined;
  const elements = held?.data;
  if (!Array.isArray(elements) && !ArrayBuffer.isView(elements))
    throw new OnnxgradError(`input "${spec.name}" is neither an array nor {data, shape}: pass a flat array of its elements`);
  return { elements: elements as Elements, shape: held!.shape ?? held!.dims, type: held!.type };
}

/** Return the elements as the array of a dtype; only plain arrays are converted. */
function converted(elements: Elements, dtype: Dtype, what: string): TypedArray {
  const type = ARRAYS[dtype];
  if (elements instanceof type) return elements;
  if (ArrayBuffer.isView(elements))
    throw new OnnxgradError(`${what} got a ${elements.constructor.name}: pass a ${type.name}, or a plain array of numbers`);
  const plain = elements as readonly (number | bigint | boolean)[];
  const nested = plain.find((x) => !["number", "bigint", "boolean"].includes(typeof x));
  if (nested !== undefined || plain.includes(undefined as never))
    throw new OnnxgradError(`${what} got an array with a ${Array.isArray(nested) ? "nested array" : typeof nested}: pass its elements as one flat array of numbers`);
  if (type === BigInt64Array || type === BigUint64Array) return bigIntegers(plain, type, what);
  const result = (type as Float32ArrayConstructor).from(plain, Number);
  if (dtype.startsWith("float")) return result;
  const i = result.findIndex((x, i) => x !== Number(plain[i]));
  if (i >= 0) throw new OnnxgradError(`${what} got ${plain[i]}, which is no ${dtype}: pass whole numbers of its range`);
  return result;
}

function bigIntegers(plain: readonly (number | bigint | boolean)[], type: BigInt64ArrayConstructor | BigUint64ArrayConstructor, what: string): TypedArray {
  const wrong = plain.find((x) => typeof x === "number" && !Number.isSafeInteger(x));
  if (wrong !== undefined) throw new OnnxgradError(`${what} got ${wrong}: pass whole numbers`);
  const result = type.from(plain.map((x) => BigInt(x)));
  const i = result.findIndex((x, i) => x !== BigInt(plain[i]!));
  if (i >= 0) throw new OnnxgradError(`${what} got ${plain[i]}, which its dtype cannot hold`);
  return result;
}

/** Return the shape of elements that came without one: a length that is free follows from theirs. */
function inferred(spec: TensorSpec, count: number, symbols: Symbols): number[] {
  let lengths = spec.shape;
  const free = () => lengths.filter((length) => typeof length !== "number").length;
  if (free() > 1) lengths = lengths.map((length) => symbols.get(String(length))?.length ?? length);
  if (free() > 1)
    throw new OnnxgradError(`input "${spec.name}" takes the shape ${printedShape(spec.shape)}, in which ${free()} lengths are free: pass {data, shape}`);
  const rest = numel(lengths.filter((length) => typeof length === "number"));
  if (free() === 1 && rest !== 0 && count % rest !== 0)
    throw new OnnxgradError(`input "${spec.name}" takes the shape ${printedShape(spec.shape)}, and ${count} elements are no multiple of ${rest}: pass whole rows`);
  return lengths.map((length) => (typeof length === "number" ? length : count / rest));
}

function noteSymbols(spec: TensorSpec, shape: readonly number[], symbols: Symbols): void {
  spec.shape.forEach((symbol, i) => {
    if (typeof symbol !== "string") return;
    const before = symbols.get(symbol);
    if (before && before.length !== shape[i])
      throw new OnnxgradError(`input "${spec.name}" has the shape ${printedShape(shape)}, but input "${before.input}" has ${before.length} rows where this one has ${shape[i]} (both are ${symbol}): pass as many of each`);
    if (!before) symbols.set(symbol, { length: shape[i]!, input: spec.name });
  });
}
