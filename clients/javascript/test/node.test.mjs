/** The client in Node, with onnxruntime-node, against the losses that Python computed. */
import assert from "node:assert/strict";
import { execFile } from "node:child_process";
import { mkdir, readFile, rm, writeFile } from "node:fs/promises";
import { join } from "node:path";
import test from "node:test";
import { fileURLToPath } from "node:url";
import { promisify } from "node:util";

import * as ort from "onnxruntime-node";

import * as onnxgrad from "../dist/index.js";
import { fileStore, readFolder } from "../dist/node.js";
import { batchesOf, largestDifference, train } from "./scenario.mjs";

const here = fileURLToPath(new URL(".", import.meta.url));
const data = process.env.ONNXGRAD_TEST_DATA ?? join(here, "data");
const out = process.env.ONNXGRAD_TEST_OUT ?? join(here, "out");
await mkdir(out, { recursive: true });

const expectedOf = async (name) => new Uint8Array(await readFile(join(data, name, "expected.safetensors")));
const batches = async (name) => {
  const { tensors } = onnxgrad.readSafetensors(await expectedOf(name));
  return batchesOf(tensors.get("images"), tensors.get("labels"));
};
const load = (name) => onnxgrad.loadArtifacts(readFolder(join(data, name)));
const create = async (name) => onnxgrad.Trainer.create(ort, await load(name));

for (const name of ["mlp", "cnn", "normalized"]) {
  test(`${name}: 200 steps of Adam have the losses of Python`, async (t) => {
    const result = await train(onnxgrad, ort, readFolder(join(data, name)), await expectedOf(name));
    assert.ok(result.losses[199] < 0.8 * result.losses[0]);
    // masks of dropout are those of the same step.onnx; a Trainer draws its own
    const reference = name === "normalized" ? "step" : "trainer";
    const difference = largestDifference(result.losses, result.expected[reference]);
    assert.ok(difference < 1e-5, `the losses differ by ${difference}`);
    assert.ok(largestDifference(result.predicted, result.exported) < 1e-5);
    assert.ok(largestDifference(result.evaluated, result.exported) < 1e-4);
    assert.ok(Number.isFinite(result.evaluatedLoss));
    t.diagnostic(`${name}: losses differ by ${difference.toExponential(1)} from ${reference}`);
    await writeFile(join(out, `${name}.safetensors`), result.checkpoint);
    await writeFile(join(out, `${name}.onnx`), result.model);
    await writeFile(join(out, `${name}.json`), JSON.stringify(result.predicted)); // which Python compares
  });
}

test("a restored state goes on as if it had not been interrupted", async () => {
  const [one, two, three] = await batches("normalized");
  const store = fileStore(join(out, "restored.safetensors"));
  await rm(join(out, "restored.safetensors"), { force: true });
  const trainer = await create("normalized");
  assert.equal(await trainer.restore(store), false);
  await trainer.step(one);
  await trainer.step(two);
  await trainer.save(store);
  const expected = await trainer.step(three);
  const other = await create("normalized");
  assert.equal(await other.restore(store), true);
  assert.equal(other.steps, 2);
  assert.equal(await other.step(three), expected);
  assert.deepEqual(other.state, trainer.state);
});

test("the state has weights, slots and buffers, and is a copy", async () => {
  const trainer = await create("normalized");
  const [batch] = await batches("normalized");
  const before = trainer.state;
  await trainer.step(batch);
  assert.deepEqual(Object.keys(before.buffers).sort(), ["mean", "var"]);
  assert.deepEqual(Object.keys(before.slots).slice(0, 2), ["w1.m", "w1.v"]);
  assert.ok(before.buffers.mean.data.every((x) => x === 0));
  assert.ok(trainer.state.buffers.mean.data.some((x) => x !== 0));
  trainer.state.weights.w1.data.fill(NaN);
  assert.ok(Number.isFinite(await trainer.step(batch)));
});

test("the learning rate is that of the call, or the default", async () => {
  const [batch] = await batches("mlp");
  const moved = async (options) => {
    const trainer = await create("mlp");
    const before = trainer.state.weights.b2.data[0];
    await trainer.step(batch, options);
    return Math.abs(trainer.state.weights.b2.data[0] - before);
  };
  // the first step of Adam moves every weight by the learning rate
  assert.ok(Math.abs((await moved(undefined)) - 2e-3) < 1e-6);
  assert.ok(Math.abs((await moved({ learningRate: 0.1 })) - 0.1) < 1e-5);
  assert.equal(await moved({ learningRate: 0 }), 0);
  await assert.rejects(moved({ learningRate: NaN }), /learningRate is NaN/);
  await assert.rejects(moved({ learningRate: -1 }), /pass a number >= 0/);
});

test("a step that is not finite changes nothing", async () => {
  const trainer = await create("mlp");
  const [batch, next] = await batches("mlp");
  await trainer.step(batch);
  const before = trainer.state;
  const broken = { ...batch, image: { ...batch.image, data: batch.image.data.map((x, i) => (i === 7 ? NaN : x)) } };
  await assert.rejects(trainer.step(broken), (error) => error instanceof onnxgrad.NotFiniteError && /loss is NaN/.test(error.message));
  await assert.rejects(trainer.step(batch, { learningRate: 1e39 }), /"\w+" gets values that are NaN or infinite/);
  assert.deepEqual(trainer.state, before);
  const other = await create("mlp");
  await other.step(batch);
  assert.equal(await trainer.step(next), await other.step(next));
});

test("labels that are no classes are refused, and change nothing", async () => {
  const trainer = await create("mlp");
  const [{ image, label }, next] = await batches("mlp");
  for (const wrong of [-1n, 10n, -10n]) {
    const batch = { image, label: label.map((y, i) => (i === 5 ? wrong : y)) };
    await assert.rejects(trainer.step(batch), /labels in 'label' are 0 to 9/);
    await assert.rejects(trainer.evaluate(batch), /labels in 'label' are 0 to 9/);
  }
  assert.equal(trainer.steps, 0);
  const ignored = label.map((y, i) => (i === 5 ? -100n : y));
  assert.ok(Number.isFinite(await trainer.step({ image, label: ignored })));
  assert.ok(Number.isFinite(await trainer.step(next)));
});

test("calls that overlap wait for each other", async () => {
  const [one, two] = await batches("mlp");
  const apart = await create("mlp");
  const expected = [await apart.step(one), (await apart.predict({ image: two.image })).logits.data, await apart.step(two)];
  const together = await create("mlp");
  const results = await Promise.all([together.step(one), together.predict({ image: two.image }), together.step(two)]);
  assert.deepEqual([results[0], results[1].logits.data, results[2]], expected);
});

test("plain arrays are converted, and shapes follow from their lengths", async () => {
  const trainer = await create("mlp");
  const [batch] = await batches("mlp");
  const other = await create("mlp");
  const plain = { image: [...batch.image.data], label: [...batch.label].map(Number) };
  assert.equal(await trainer.step(plain), await other.step(batch));
  const tensors = { image: new ort.Tensor("float32", batch.image.data, [32, 64]), label: new ort.Tensor("int64", batch.label, [32]) };
  assert.equal(await trainer.step(tensors), await other.step(batch));
});

test("errors name the input, what it takes and the remedy", async () => {
  const trainer = await create("mlp");
  const [{ image, label }] = await batches("mlp");
  const refused = (batch, message) => assert.rejects(trainer.step(batch), message);
  await refused({ image }, /input "label" is missing: pass int64 \[\w+\]/);
  await refused({ image, label, other: [1] }, /no input "other": the inputs are "image", "label"/);
  await refused({ image: new Float64Array(64), label: [1] }, /"image", which takes float32 .* got a Float64Array: pass a Float32Array/);
  await refused({ image, label: new Int32Array(32) }, /"label".* got a Int32Array: pass a BigInt64Array/);
  await refused({ image, label: [0.5] }, /"label".* got 0.5: pass whole numbers/);
  await refused({ image: [[1, 2]], label: [1] }, /"image".* nested array: pass its elements as one flat array/);
  await refused({ image: { data: image.data, shape: [64, 32] }, label }, /"image" takes the shape \[\w+, 64\], not \[64, 32\]/);
  await refused({ image: { data: image.data, shape: [31, 64] }, label }, /2048 elements, but its shape \[31, 64\] holds 1984/);
  await refused({ image: image.data.subarray(1), label }, /2047 elements are no multiple of 64: pass whole rows/);
  await refused({ image, label: label.subarray(1) }, /"label" has the shape \[31\], but input "image" has 32 rows/);
  await refused({ image: [], label: [] }, /"image" is empty: pass at least one row/);
  await refused({ image: 3, label }, /"image" is neither an array nor \{data, shape\}/);
  await assert.rejects(trainer.predict({ image, label }), /no input "label": the inputs are "image"/);
  assert.equal(trainer.steps, 0);
  await trainer.release();
  await refused({ image, label }, /released: create another/);
});

test("artifacts and checkpoints of other trainings are refused", async () => {
  const { loadArtifacts, Trainer } = onnxgrad;
  await assert.rejects(loadArtifacts({}), /no file "training.json" among \[\]/);
  await assert.rejects(loadArtifacts("folder"), /pass readFolder\(path\)/);
  const manifest = JSON.parse(await readFile(join(data, "mlp", "training.json"), "utf8"));
  const json = (changes) => ({ "training.json": new TextEncoder().encode(JSON.stringify({ ...manifest, ...changes })) });
  await assert.rejects(loadArtifacts(json({ format: 2 })), /format 2, this package reads 1/);
  await assert.rejects(loadArtifacts(json({ inputs: [{ ...manifest.inputs[0], dtype: "float16" }] })), /"image" has the dtype float16/);
  await assert.rejects(loadArtifacts(json({ scalars: [{ name: "epoch", dtype: "float32", shape: [] }] })), /scalar "epoch"/);
  await assert.rejects(loadArtifacts(json({})), /no file "checkpoint.safetensors"/);
  const { step, ...files } = manifest.files;
  const checkpoint = new Uint8Array(await readFile(join(data, "mlp", "checkpoint.safetensors")));
  const without = await loadArtifacts({ ...json({ files }), "checkpoint.safetensors": checkpoint });
  await assert.rejects(Trainer.create(ort, without), /no file "step": write the artifacts again, with an optimizer/);

  const trainer = await create("mlp");
  const file = onnxgrad.readSafetensors(checkpoint);
  const changed = (change, metadata = {}) => {
    const tensors = new Map(file.tensors);
    change(tensors);
    return trainer.restore(onnxgrad.writeSafetensors({ tensors, metadata }));
  };
  await assert.rejects(trainer.restore(new Uint8Array(await readFile(join(data, "cnn", "checkpoint.safetensors")))), /of another model/);
  await assert.rejects(changed((t) => t.delete("w1.m")), /has no "w1.m"/);
  await assert.rejects(changed((t) => t.set("w3", t.get("w1"))), /holds "w3", which these artifacts lack/);
  await assert.rejects(changed((t) => t.set("b2", t.get("b1"))), /"b2" is float32 \[64\] in the checkpoint, but float32 \[10\]/);
  await assert.rejects(changed(() => {}, { step: "-1" }), /step=-1/);
  await assert.rejects(trainer.restore(checkpoint.subarray(0, checkpoint.length - 4)), /no complete safetensors file/);
  assert.equal(await changed(() => {}, { step: "7" }), true);
  assert.equal(trainer.steps, 7);
});

test("the example trains, and goes on from its state", async () => {
  const folder = join(here, "..", "example", "dist", "artifacts");
  const cwd = join(out, "example");
  await rm(cwd, { recursive: true, force: true });
  await mkdir(cwd);
  const run = async () => {
    const { stdout } = await promisify(execFile)(process.execPath, [join(here, "..", "example", "node.mjs"), folder], { cwd });
    return stdout.trim().split("\n");
  };
  const losses = (await run()).map((line) => Number(line.split(" ")[1]));
  assert.ok(losses.length === 5 && losses[4] < losses[0] / 2, `${losses}`);
  const lines = await run();
  assert.equal(lines[0], "goes on after 100 steps");
  assert.ok(Number(lines[5].split(" ")[1]) < losses[4]);
  const session = await ort.InferenceSession.create(join(cwd, "trained.onnx"));
  assert.deepEqual(session.outputNames, ["logits"]);
});
