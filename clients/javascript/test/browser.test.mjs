/** The client and the page in headless Chromium, where it is installed. */
import assert from "node:assert/strict";
import { existsSync } from "node:fs";
import { cp, mkdir, readFile, rm, writeFile } from "node:fs/promises";
import { join } from "node:path";
import test, { after, before } from "node:test";
import { fileURLToPath } from "node:url";

import { build } from "esbuild";
import * as ort from "onnxruntime-node";
import { chromium } from "playwright-core";

import { readSafetensors } from "../dist/index.js";
import { serve } from "../example/serve.mjs";
import { largestDifference } from "./scenario.mjs";

const executablePath = process.env.CHROMIUM ?? ["/usr/bin/chromium", "/usr/bin/chromium-browser", "/usr/bin/google-chrome"].find(existsSync);
const skip = executablePath ? false : "there is no Chromium: name it in the variable CHROMIUM";

const here = fileURLToPath(new URL(".", import.meta.url));
const data = process.env.ONNXGRAD_TEST_DATA ?? join(here, "data");
const out = process.env.ONNXGRAD_TEST_OUT ?? join(here, "out");
const page = join(here, "..", "example", "dist");
const site = join(out, "site");
let browser, server, address;

before(async () => {
  if (skip) return;
  await rm(site, { recursive: true, force: true });
  await mkdir(site, { recursive: true });
  await build({ entryPoints: [join(here, "browser.mjs")], outdir: site, bundle: true, format: "esm", logLevel: "warning" });
  await writeFile(join(site, "index.html"), '<!doctype html><link rel="icon" href="data:,"><script type="module" src="browser.js"></script>');
  await cp(page, join(site, "page"), { recursive: true });
  await cp(join(page, "ort-wasm-simd-threaded.wasm"), join(site, "ort-wasm-simd-threaded.wasm"));
  for (const name of ["mlp", "cnn", "normalized"]) await cp(join(data, name), join(site, name), { recursive: true });
  ({ server, address } = await serve(site));
  browser = await chromium.launch({ executablePath, args: ["--no-sandbox"] });
});

after(async () => {
  await browser?.close();
  server?.close();
});

/** Open a page that fails the test with the first error that it reports. */
async function open(path, options = {}) {
  const context = await browser.newContext(options);
  const opened = await context.newPage();
  const errors = [];
  opened.on("pageerror", (error) => errors.push(error.message));
  opened.on("console", (message) => message.type() === "error" && errors.push(message.text()));
  await opened.goto(address + path);
  return { opened, context, errors };
}

for (const name of ["mlp", "cnn", "normalized"]) {
  test(`${name} in Chromium: 200 steps of Adam have the losses of Python`, { skip }, async (t) => {
    const { opened, context, errors } = await open("");
    await opened.waitForFunction(() => window.trainCase);
    const result = await opened.evaluate((at) => window.trainCase(at), name);
    const reference = name === "normalized" ? "step" : "trainer"; // as in node.test.mjs
    const difference = largestDifference(result.losses, result.expected[reference]);
    assert.ok(difference < 1e-5, `the losses differ by ${difference}`);
    assert.ok(largestDifference(result.predicted, result.exported) < 1e-5);
    assert.ok(result.checkpoint > 1000 && result.model > 1000);
    assert.deepEqual(errors, []);
    t.diagnostic(`${name}: losses differ by ${difference.toExponential(1)} from ${reference}`);
    await context.close();
  });
}

const text = (opened, id) => opened.locator(`#${id}`).textContent();
const said = (opened, pattern) => opened.waitForFunction((source) => new RegExp(source).test(document.querySelector("#status").textContent), pattern.source, { timeout: 90_000 });

/** Draw lines, given in hundredths of the drawing area, as a hand or a finger would. */
async function draw(opened, ...lines) {
  await opened.locator("#canvas").scrollIntoViewIfNeeded();
  const box = await opened.locator("#canvas").boundingBox();
  for (const line of lines) {
    const points = line.map(([x, y]) => [box.x + (x / 100) * box.width, box.y + (y / 100) * box.height]);
    await opened.mouse.move(...points[0]);
    await opened.mouse.down();
    for (const point of points.slice(1)) await opened.mouse.move(...point, { steps: 2 });
    await opened.mouse.up();
  }
}

const ring = Array.from({ length: 25 }, (_, i) => [50 + 22 * Math.sin(i / 3.9), 50 - 32 * Math.cos(i / 3.9)]);
const SHAPES = {
  0: [ring],
  1: [[[42, 28], [52, 16], [52, 84]]],
  2: [[[32, 32], [40, 18], [58, 18], [66, 34], [52, 56], [32, 82], [70, 82]]],
  3: [[[34, 20], [58, 20], [64, 34], [48, 48], [64, 60], [60, 80], [34, 82]]],
  4: [[[56, 84], [56, 16], [28, 60], [72, 60]]],
  5: [[[66, 18], [38, 18], [36, 46], [60, 46], [66, 64], [56, 82], [32, 80]]],
  7: [[[30, 18], [68, 18], [44, 84]]],
};

async function add(opened, label) {
  await draw(opened, ...SHAPES[label]);
  await opened.locator("#labels button").nth(label).click();
}

for (const [name, viewport] of Object.entries({ desktop: { width: 1280, height: 800 }, phone: { width: 390, height: 844 } })) {
  test(`the page trains on drawings: ${name}`, { skip }, async () => {
    const phone = name === "phone";
    const { opened, context, errors } = await open("page/", { viewport, hasTouch: phone, isMobile: phone, acceptDownloads: true });
    await said(opened, /A network trained in Python/);
    const accuracy = parseFloat(await text(opened, "accuracy"));
    assert.ok(accuracy > 85, `accuracy ${accuracy}`);

    const drawn = Object.keys(SHAPES).slice(phone ? 4 : 0);
    for (const label of drawn) await add(opened, Number(label));
    assert.equal(await opened.locator("#examples li").count(), drawn.length);
    await opened.locator("#examples button").last().click(); // removes the first one
    assert.equal(await text(opened, "own"), String(drawn.length - 1));
    await add(opened, 0);

    await opened.selectOption("#start", "zero");
    await said(opened, /An untrained network/);
    assert.ok(parseFloat(await text(opened, "accuracy")) < 40);
    await opened.fill("#count", "300");
    await opened.click("#train");
    await said(opened, /Trained 300 steps/);
    assert.equal(await text(opened, "steps"), "300");
    assert.ok(parseFloat(await text(opened, "loss")) < 0.5);
    assert.ok(parseFloat(await text(opened, "accuracy")) > 80);
    await draw(opened, ...SHAPES[7]);
    await opened.waitForFunction(() => document.querySelector("#best").textContent === "7");
    assert.equal(await opened.evaluate(() => document.documentElement.scrollWidth <= innerWidth), true);
    await opened.mouse.move(0, 0);
    await opened.evaluate(() => (document.activeElement.blur(), scrollTo(0, 0)));
    await opened.evaluate(() => Promise.all(document.getAnimations().map((one) => one.finished))); // of the bars
    await opened.screenshot({ path: join(out, `${name}.png`) });
    await opened.screenshot({ path: join(out, `${name}-full.png`), fullPage: true });

    await opened.click("#save");
    await said(opened, /saved in this browser/);
    await opened.reload();
    await said(opened, /A network trained in Python/);
    assert.equal(await text(opened, "steps"), "0");
    await opened.click("#restore");
    await said(opened, /Restored the state after 300 steps/);
    await requireModel(opened);
    assert.deepEqual(errors, []);
    await context.close();
  });
}

/** Run the model that the page gives for download, and compare it with the state that it gives. */
async function requireModel(opened) {
  const bytes = async (id) => {
    const [file] = await Promise.all([opened.waitForEvent("download"), opened.click(`#${id}`)]);
    return new Uint8Array(await readFile(await file.path()));
  };
  const { tensors, metadata } = readSafetensors(await bytes("download-state"));
  assert.equal(metadata.step, "300");
  const model = await bytes("download");
  const weight = tensors.get("6.weight").data;
  const found = Buffer.from(model).indexOf(Buffer.from(weight.buffer, weight.byteOffset, weight.byteLength));
  assert.ok(found > 0, "the model does not hold the weights of the state");
  const digits = readSafetensors(new Uint8Array(await readFile(join(page, "artifacts", "digits.safetensors")))).tensors;
  const images = Float32Array.from(digits.get("images").data.subarray(0, 640), (x) => x / 16);
  const session = await ort.InferenceSession.create(model);
  const { logits } = await session.run({ image: new ort.Tensor("float32", images, [10, 1, 8, 8]) });
  const best = Array.from({ length: 10 }, (_, i) => logits.data.slice(10 * i, 10 * i + 10)).map((row) => row.indexOf(Math.max(...row)));
  const right = best.filter((digit, i) => digit === digits.get("labels").data[i]);
  assert.ok(right.length >= 8, `${best} is not ${digits.get("labels").data.subarray(0, 10)}`);
}

test("the page can be used by the keyboard alone", { skip }, async () => {
  const { opened, context, errors } = await open("page/", { viewport: { width: 1280, height: 800 } });
  await said(opened, /A network trained in Python/);
  await opened.keyboard.press("Tab");
  assert.equal(await opened.evaluate(() => document.activeElement.id), "canvas");
  await opened.keyboard.press("Space");
  for (let i = 0; i < 18; i++) await opened.keyboard.press("ArrowDown");
  await opened.waitForFunction(() => document.querySelector("#best").textContent === "1");
  await opened.keyboard.press("1");
  assert.equal(await opened.locator("#examples button").getAttribute("aria-label"), "Remove this example of the digit 1");
  await opened.keyboard.press("1");
  await said(opened, /Draw a digit first/); // the sheet is empty again
  const unnamed = await opened.evaluate(() =>
    [...document.querySelectorAll("button, input, select, canvas, progress")].filter(
      (e) => !e.closest("[aria-label]") && !e.textContent.trim() && !(e.labels && e.labels.length),
    ).map((e) => e.outerHTML),
  );
  assert.deepEqual(unnamed, []);
  assert.deepEqual(errors, []);
  await context.close();
});
