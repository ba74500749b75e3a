/** What the page of the browser's tests loads. */
import * as ort from "onnxruntime-web/wasm";

import * as onnxgrad from "../dist/index.js";
import { train } from "./scenario.mjs";

ort.env.wasm.numThreads = 1;
ort.env.wasm.wasmPaths = { wasm: "/ort-wasm-simd-threaded.wasm" };

/** Train a case whose files are served at an address; bytes come back as their lengths. */
window.trainCase = async (address) => {
  const response = await fetch(`${address}/expected.safetensors`);
  const expected = new Uint8Array(await response.arrayBuffer());
  const { checkpoint, model, ...numbers } = await train(onnxgrad, ort, address, expected);
  return { ...numbers, checkpoint: checkpoint.length, model: model.length };
};
