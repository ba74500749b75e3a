/** Train the digits in Node: `node node.mjs ARTIFACTS` after `python make_artifacts.py ARTIFACTS`. */
import { readFile, writeFile } from "node:fs/promises";

import { loadArtifacts, readSafetensors, Trainer } from "onnxgrad";
import { fileStore, readFolder } from "onnxgrad/node";
import * as ort from "onnxruntime-node";

const folder = process.argv[2] ?? "artifacts";
const { tensors } = readSafetensors(await readFile(`${folder}/digits.safetensors`));
const images = Float32Array.from(tensors.get("images").data, (x) => x / 16);
const labels = [...tensors.get("labels").data];

const trainer = await Trainer.create(ort, await loadArtifacts(readFolder(folder)));
const state = fileStore("state.safetensors");
if (await trainer.restore(state)) console.log(`goes on after ${trainer.steps} steps`);
for (let i = 0; i < 100; i++) {
  const begin = 32 * (trainer.steps % 44);
  const image = images.subarray(64 * begin, 64 * (begin + 32)); // the shape follows: [32, 1, 8, 8]
  const label = labels.slice(begin, begin + 32);
  const loss = await trainer.step({ image, label }, { learningRate: 1e-3 });
  if (trainer.steps % 20 === 0) console.log(trainer.steps, loss);
}
await trainer.save(state);
await writeFile("trained.onnx", await trainer.export());
await trainer.release();
