/** Write the page into `dist/`, a folder that any web server serves. */
import { cp, mkdir, rm } from "node:fs/promises";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";

import { build } from "esbuild";

const here = dirname(fileURLToPath(import.meta.url));
const dist = join(here, "dist");
const artifacts = process.env.ONNXGRAD_ARTIFACTS ?? join(here, "artifacts");
await rm(dist, { recursive: true, force: true });
await mkdir(dist, { recursive: true });
await build({
  entryPoints: [join(here, "src", "main.ts")],
  alias: { onnxgrad: join(here, "..", "dist", "index.js") },
  outdir: dist,
  bundle: true,
  minify: true,
  format: "esm",
  target: "es2022",
  logLevel: "warning",
});
for (const file of ["index.html", "style.css"]) await cp(join(here, file), join(dist, file));
const wasm = "ort-wasm-simd-threaded.wasm";
await cp(join(here, "..", "node_modules", "onnxruntime-web", "dist", wasm), join(dist, wasm));
await cp(artifacts, join(dist, "artifacts"), { recursive: true }).catch((error) => {
  if (error.code !== "ENOENT") throw error;
  throw new Error(`${artifacts} is missing: run python example/make_artifacts.py first`);
});
