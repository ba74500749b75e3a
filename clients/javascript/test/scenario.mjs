/** What is tested both in Node and in the browser: it gets what to test with, and returns numbers. */

/** Train on the batches of a case; return the losses and what comes after. */
export async function train(onnxgrad, ort, source, expectedBytes) {
  const { tensors } = onnxgrad.readSafetensors(expectedBytes);
  const batches = batchesOf(tensors.get("images"), tensors.get("labels"));
  const artifacts = await onnxgrad.loadArtifacts(source);
  const trainer = await onnxgrad.Trainer.create(ort, artifacts, { session: { intraOpNumThreads: 1 } });
  const losses = [];
  for (const batch of batches) losses.push(await trainer.step(batch));
  const { logits } = await trainer.predict({ image: batches[0].image });
  const evaluated = await trainer.evaluate(batches[0]);
  const checkpoint = await trainer.checkpoint();
  const model = await trainer.export();
  const session = await ort.InferenceSession.create(model, {});
  const { data, shape } = batches[0].image;
  const exported = (await session.run({ image: new ort.Tensor("float32", data, shape) })).logits;
  await session.release();
  await trainer.release();
  return {
    losses,
    expected: Object.fromEntries(["trainer", "step"].map((name) => [name, [...tensors.get(name).data]])),
    predicted: [...logits.data],
    exported: [...exported.data],
    evaluated: [...evaluated.outputs.logits.data],
    evaluatedLoss: evaluated.loss,
    checkpoint,
    model,
  };
}

/** Return milliseconds a step: those of the fastest 10 of 400 steps in a row. */
export async function measure(onnxgrad, ort, source, expectedBytes) {
  const { tensors } = onnxgrad.readSafetensors(expectedBytes);
  const batches = batchesOf(tensors.get("images"), tensors.get("labels"));
  const trainer = await onnxgrad.Trainer.create(ort, await onnxgrad.loadArtifacts(source), { session: { intraOpNumThreads: 1 } });
  let fastest = Infinity;
  for (let i = 0; i < 400; i += 10) {
    const begin = performance.now();
    for (let k = i; k < i + 10; k++) await trainer.step(batches[k % batches.length]);
    fastest = Math.min(fastest, (performance.now() - begin) / 10);
  }
  await trainer.release();
  return fastest;
}

export function batchesOf(images, labels) {
  const [count, rows, ...rest] = images.shape;
  const size = images.data.length / count;
  return Array.from({ length: count }, (_, i) => ({
    image: { data: images.data.slice(i * size, (i + 1) * size), shape: [rows, ...rest] },
    label: labels.data.slice(i * rows, (i + 1) * rows),
  }));
}

export function largestDifference(a, b) {
  if (a.length !== b.length) return Infinity;
  return a.reduce((most, x, i) => Math.max(most, Number.isFinite(x - b[i]) ? Math.abs(x - b[i]) : Infinity), 0);
}
