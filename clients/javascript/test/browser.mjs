/** What the page of the browser's tests loads. */
import * as ort from "onnxruntime-web/wasm";

import * as onnxgrad from "../dist/index.js";
import { measure, train } from "./scenario.mjs";

ort.env.wasm.numThreads = 1;
ort.env.wasm.wasmPaths = { wasm: "/ort-wasm-simd-threaded.wasm" };

/** Train a case whose files are served at an address; bytes come back as their lengths. */
window.trainCase = async (address) => {
  const response = await fetch(`${address}/expected.safetensors`);
  const expected = new Uint8Array(await response.arrayBuffer());
  const { checkpoint, model, ...numbers } = await train(onnxgrad, ort, address, expected);
  return { ...numbers, checkpoint: checkpoint.length, model: model.length };
};

/** Measure a case; `runtime` is the address of the files of onnxruntime-web. */
window.measureCase = async (address, runtime) => {
  ort.env.wasm.wasmPaths = { wasm: `${runtime}ort-wasm-simd-threaded.wasm` };
  const response = await fetch(`${address}/expected.safetensors`);
  return measure(onnxgrad, ort, address, new Uint8Array(await response.arrayBuffer()));
};
