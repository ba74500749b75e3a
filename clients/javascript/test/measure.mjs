/** Print milliseconds a step of the cases of make_data.py, in Node and in Chromium, on one thread. */
import { readFile } from "node:fs/promises";
import { join } from "node:path";
import { fileURLToPath } from "node:url";

import { build } from "esbuild";
import * as ort from "onnxruntime-node";
import { chromium } from "playwright-core";

import * as onnxgrad from "../dist/index.js";
import { readFolder } from "../dist/node.js";
import { serve } from "../example/serve.mjs";
import { measure } from "./scenario.mjs";

const here = fileURLToPath(new URL(".", import.meta.url));
const data = join(here, "data");
const { outputFiles } = await build({ entryPoints: [join(here, "browser.mjs")], bundle: true, write: false, format: "esm" });
const { server, address } = await serve(data);
const wasm = await serve(join(here, "..", "node_modules", "onnxruntime-web", "dist"));
const browser = await chromium.launch({ executablePath: process.env.CHROMIUM ?? "/usr/bin/chromium", args: ["--no-sandbox", "--disable-web-security"] });
const page = await browser.newPage();
await page.goto(`${address}mlp/training.json`);
await page.addScriptTag({ type: "module", content: outputFiles[0].text });
await page.waitForFunction(() => window.measureCase);
for (const name of ["mlp", "cnn"]) {
  const expected = new Uint8Array(await readFile(join(data, name, "expected.safetensors")));
  const inNode = await measure(onnxgrad, ort, readFolder(join(data, name)), expected);
  const inChromium = await page.evaluate(([at, runtime]) => window.measureCase(at, runtime), [`${address}${name}`, wasm.address]);
  console.log(`${name}: Node ${inNode.toFixed(3)} ms a step, Chromium ${inChromium.toFixed(3)}`);
}
await browser.close();
server.close();
wasm.server.close();
