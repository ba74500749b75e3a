/** The page: what happens when a visitor draws, adds, trains and keeps. */
import * as ort from "onnxruntime-web/wasm";
import { browserStore, loadArtifacts, NotFiniteError, Trainer } from "onnxgrad";

import { LossChart } from "./chart.js";
import { batchOf, drawn, loadDigits, type Digits, type Example } from "./data.js";
import { Sheet, showPixels } from "./drawing.js";
import { buildBars, buildLabels, byId, download, exampleItem, say } from "./elements.js";

const ARTIFACTS = "artifacts/";
const ROWS = 32;
const FRAME = 40; // milliseconds of training between two updates of the page

ort.env.wasm.numThreads = 1; // more need headers that pages of simple servers do not have
ort.env.wasm.wasmPaths = { wasm: new URL("ort-wasm-simd-threaded.wasm", document.baseURI).href };

const store = browserStore("digits");
const own: Example[] = [];
const chart = new LossChart(byId("chart"));
const showBars = buildBars(byId("bars"));
const sheet = new Sheet(byId<HTMLCanvasElement>("canvas"), () => void predict());
let trainer: Trainer;
let digits: Digits;
let stopped = false;
let predicting: Promise<void> | undefined;

/** Show what the network thinks of the drawing; strokes that come meanwhile are shown together. */
function predict(): void {
  byId("hint").hidden = !sheet.empty;
  if (!trainer || predicting) return;
  predicting = shown().finally(() => (predicting = undefined));
}

async function shown(): Promise<void> {
  let strokes: Float32Array | undefined;
  do {
    const pixels = sheet.empty ? undefined : sheet.pixels();
    strokes = pixels;
    showPixels(byId<HTMLCanvasElement>("seen"), pixels ?? new Float32Array(64));
    if (!pixels) showBars(undefined);
    else showBars((await trainer.predict({ image: batchOf([{ pixels, label: 0 }]).image })).logits!.data as Float32Array);
  } while (sheet.empty ? strokes !== undefined : strokes?.join() !== sheet.pixels().join());
}

function add(label: number): void {
  if (sheet.empty) return say("Draw a digit first, then say what it is.");
  const example = { pixels: sheet.pixels(), label };
  own.push(example);
  const item = exampleItem(example, () => {
    own.splice(own.indexOf(example), 1);
    item.remove();
    showCounts();
  });
  byId("examples").prepend(item);
  sheet.clear();
  showCounts();
  say(`Added the drawing as ${label}. ${own.length === 1 ? "Add some more, or train." : `You have ${own.length} examples.`}`);
}

function showCounts(): void {
  byId("own").textContent = String(own.length);
  byId("none").hidden = own.length > 0;
  byId("steps").textContent = trainer.steps.toLocaleString("en");
}

async function showAccuracy(): Promise<void> {
  const { logits } = await trainer.predict({ image: batchOf(digits.heldOut).image });
  const scores = logits!.data as Float32Array;
  const right = digits.heldOut.filter(({ label }, i) => {
    const row = scores.subarray(10 * i, 10 * i + 10);
    return row.indexOf(Math.max(...row)) === label;
  });
  byId("accuracy").textContent = `${((100 * right.length) / digits.heldOut.length).toFixed(1)} %`;
}

/** Load the state that the visitor chose to start from. */
async function start(): Promise<void> {
  const pretrained = byId<HTMLSelectElement>("start").value === "pretrained";
  const file = pretrained ? "pretrained.safetensors" : trainer.manifest.files.checkpoint!;
  const response = await fetch(ARTIFACTS + file);
  if (!response.ok) throw new Error(`${response.url} answers ${response.status}`);
  await trainer.restore(new Uint8Array(await response.arrayBuffer()));
  chart.clear();
  byId("loss").textContent = "";
  await changed();
  say(pretrained ? "A network trained in Python on 1,437 digits. How well does it know yours?" : "An untrained network: it guesses. Train it.");
}

async function changed(): Promise<void> {
  showCounts();
  await showAccuracy();
  predict();
}

async function train(): Promise<void> {
  const known = byId<HTMLInputElement>("mixed").checked ? digits.known : [];
  if (known.length + own.length === 0) return say("Add an example first, or mix in the digits.");
  const count = Number(byId<HTMLInputElement>("count").value);
  const learningRate = Number(byId<HTMLSelectElement>("rate").value);
  const progress = byId<HTMLProgressElement>("progress");
  stopped = false;
  let done = 0;
  let milliseconds = 0;
  let last = performance.now();
  progress.value = 0;
  while (done < count && !stopped) {
    const batch = batchOf(drawn(own, known, ROWS));
    const begin = performance.now();
    const loss = await trainer.step(batch, { learningRate });
    milliseconds += performance.now() - begin;
    done += 1;
    const mean = chart.add(trainer.steps, loss);
    if (performance.now() - last < FRAME && done < count) continue;
    progress.value = done / count;
    byId("loss").textContent = mean.toFixed(4);
    byId("steps").textContent = trainer.steps.toLocaleString("en");
    chart.draw();
    await new Promise(requestAnimationFrame);
    last = performance.now();
  }
  await changed();
  say(`${stopped ? "Stopped after" : "Trained"} ${done} steps, ${(milliseconds / done).toFixed(1)} ms each.`);
}

/** Run what a button asks for, with the buttons disabled; say what went wrong. */
async function busy(action: () => Promise<void>): Promise<void> {
  const buttons = ["train", "save", "restore", "download", "download-state", "start"].map((id) => byId<HTMLButtonElement>(id));
  for (const button of buttons) button.disabled = true;
  byId<HTMLButtonElement>("stop").disabled = action !== train;
  try {
    await action();
  } catch (error) {
    say(error instanceof NotFiniteError ? `${error.message}.` : `This did not work: ${(error as Error).message}`, true);
  }
  for (const button of buttons) button.disabled = trainer === undefined;
  byId<HTMLButtonElement>("stop").disabled = true;
}

function on(id: string, event: string, action: () => Promise<void>): void {
  byId(id).addEventListener(event, (e) => {
    e.preventDefault();
    void busy(action);
  });
}

buildLabels(byId("labels"), add);
byId("clear").addEventListener("click", () => sheet.clear());
byId("stop").addEventListener("click", () => (stopped = true));
byId("canvas").addEventListener("keydown", (event) => {
  if (/^[0-9]$/.test(event.key) && !event.ctrlKey && !event.metaKey && !event.altKey) add(Number(event.key));
});
on("settings", "submit", train);
on("start", "change", start);
on("save", "click", async () => {
  await trainer.save(store);
  say("The weights are saved in this browser, the examples are not. Restore brings them back, also after the page was closed.");
});
on("restore", "click", async () => {
  if (!(await trainer.restore(store))) return say("Nothing is saved in this browser yet.");
  chart.clear();
  await changed();
  say(`Restored the state after ${trainer.steps} steps.`);
});
on("download", "click", async () => download(await trainer.export(), "digits.onnx"));
on("download-state", "click", async () => download(await trainer.checkpoint(), "digits.safetensors"));

void busy(async () => {
  showBars(undefined);
  chart.draw();
  const [artifacts, loaded] = await Promise.all([loadArtifacts(ARTIFACTS), loadDigits(`${ARTIFACTS}digits.safetensors`)]);
  digits = loaded;
  trainer = await Trainer.create(ort, artifacts, { session: { executionProviders: ["wasm"] } });
  await start();
});
