/** Files of tensors and models, read and written without a session. */
import assert from "node:assert/strict";
import test from "node:test";

import { BinaryReader, BinaryWriter } from "@bufbuild/protobuf/wire";

import { readSafetensors, writeSafetensors } from "../dist/index.js";
import { withInputs, withTensors } from "../dist/onnx.js";

const tensor = (dtype, shape, data) => ({ dtype, shape, data });

test("tensors of every dtype come back, at odd offsets too", () => {
  const tensors = new Map([
    ["flag", tensor("bool", [3], Uint8Array.of(1, 0, 1))],
    ["number", tensor("float64", [], Float64Array.of(Math.PI))],
    ["", tensor("int64", [1, 2], BigInt64Array.of(-1n, 2n ** 62n))],
    ["__proto__", tensor("float32", [0, 2], new Float32Array(0))],
    ["Gewicht ä/😀", tensor("float32", [2], Float32Array.of(1.5, NaN))],
  ]);
  const file = writeSafetensors({ tensors, metadata: { step: "3" } });
  const shifted = new Uint8Array(file.length + 1);
  shifted.set(file, 1);
  for (const bytes of [file, shifted.subarray(1)]) {
    const read = readSafetensors(bytes);
    assert.equal(read.metadata.step, "3");
    for (const [name, one] of tensors) assert.deepEqual(read.tensors.get(name), one, name);
    assert.equal(read.tensors.size, tensors.size);
  }
});

test("damaged files of tensors are refused", () => {
  const file = writeSafetensors({ tensors: new Map([["w", tensor("float32", [2], Float32Array.of(1, 2))]]), metadata: {} });
  for (const end of [0, 7, 9, file.length - 1]) assert.throws(() => readSafetensors(file.slice(0, end)), /no complete safetensors file/);
  const header = (entry) => {
    const json = new TextEncoder().encode(JSON.stringify({ w: entry }));
    const bytes = new Uint8Array(8 + json.length + 8);
    bytes[0] = json.length;
    bytes.set(json, 8);
    return bytes;
  };
  assert.throws(() => readSafetensors(header({ dtype: "BF16", shape: [4], data_offsets: [0, 8] })), /"w" has the dtype BF16/);
  assert.throws(() => readSafetensors(header({ dtype: "F32", shape: [4], data_offsets: [0, 8] })), /"w" lies outside/);
  assert.throws(() => readSafetensors(header({ dtype: "F32", shape: [2], data_offsets: [-8, 0] })), /"w" lies outside/);
});

/** A message of fields of bytes, text and integers, as `{number: values}`. */
function message(fields) {
  const writer = new BinaryWriter();
  for (const [field, value] of fields) {
    if (typeof value === "number") writer.tag(field, 0).int64(value);
    else writer.tag(field, 2).bytes(typeof value === "string" ? new TextEncoder().encode(value) : value);
  }
  return writer.finish();
}

function fieldsOf(bytes) {
  const reader = new BinaryReader(bytes);
  const fields = [];
  while (reader.pos < reader.len) {
    const [field, wire] = reader.tag();
    fields.push([field, wire === 2 ? reader.bytes() : Number(reader.int64())]);
  }
  return fields;
}

const floats = (...values) => new Uint8Array(Float32Array.from(values).buffer);
const packed = (...lengths) => lengths.reduce((writer, n) => writer.int64(n), new BinaryWriter()).finish();
const initializer = message([[1, packed(1, 2)], [2, 1], [4, floats(1, 2)], [8, "w"], [12, "a weight"]]);
const constant = message([[2, "c"], [4, "Constant"], [5, message([[1, "value"], [5, message([[1, 1], [2, 1], [9, floats(3)]])], [20, 4]])]]);
const other = message([[1, packed(2)], [2, 1], [9, floats(5, 6)], [8, "other"]]);
// 1 is the IR version, 99 a field that ONNX does not have yet
const model = message([[1, 9], [99, "later"], [7, message([[1, constant], [2, "graph"], [5, initializer], [5, other], [99, 7]])]]);
const graphOf = (bytes) => fieldsOf(fieldsOf(bytes).find(([field]) => field === 7)[1]);

test("weights of a model are replaced, all else stays", () => {
  const tensors = new Map([["w", tensor("float32", [1, 2], Float32Array.of(7, 8))], ["c", tensor("float32", [1], Float32Array.of(9))], ["w.m", tensor("float32", [], Float32Array.of(0))]]);
  const { model: changed, found } = withTensors(model, tensors);
  assert.deepEqual([...found].sort(), ["c", "w"]);
  assert.deepEqual(fieldsOf(changed).slice(0, 2), fieldsOf(model).slice(0, 2));
  const [node, , weight, kept, later] = graphOf(changed);
  assert.deepEqual(kept, graphOf(model)[3]);
  assert.deepEqual(later, [99, 7]);
  assert.deepEqual(fieldsOf(weight[1]), fieldsOf(message([[1, 1], [1, 2], [2, 1], [8, "w"], [12, "a weight"], [9, floats(7, 8)]])));
  const attribute = fieldsOf(fieldsOf(node[1])[2][1]);
  assert.deepEqual(fieldsOf(attribute[1][1]), fieldsOf(message([[1, 1], [2, 1], [9, floats(9)]])));
  assert.deepEqual(attribute[2], [20, 4]);
  assert.deepEqual(withTensors(model, new Map()).model, model);
});

test("a tensor of another shape or dtype is not written", () => {
  const wrong = (one) => () => withTensors(model, new Map([["w", one]]));
  assert.throws(wrong(tensor("float32", [2, 1], new Float32Array(2))), /"w" is float32 \[1, 2\] in the model, but float32 \[2, 1\]/);
  assert.throws(wrong(tensor("float64", [1, 2], new Float64Array(2))), /but float64 \[1, 2\]/);
  assert.throws(wrong(tensor("float32", [1, 2], new Float32Array(3))), /3 elements, its shape is \[1, 2\]/);
});

test("weights become inputs, once", () => {
  const tensors = new Map([["w", tensor("float32", [1, 2], new Float32Array(2))], ["c", tensor("float32", [1], new Float32Array(1))]]);
  const { model: changed } = withInputs(model, tensors);
  const graph = graphOf(changed);
  assert.deepEqual(graph.map(([field]) => field), [2, 5, 99, 11, 11]); // neither the node nor the initializer
  const twice = withInputs(message([[7, message([[5, initializer], [11, message([[1, "w"]])]])]]), tensors);
  assert.deepEqual(graphOf(twice.model).map(([field]) => field), [11]);
});
