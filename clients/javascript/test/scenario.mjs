/** What is tested both in Node and in the browser: it gets what to test with, and returns numbers. */

/** Train on the batches of a case; return the losses and what comes after. */
export async function train(onnxgrad, ort, source, expectedBytes) {
  const { tensors } = onnxgrad.readSafetensors(expectedBytes);
  const batches = batchesOf(tensors.get("images"), tensors.get("labels"));
  const artifacts = await onnxgrad.loadArtifacts(source);
  const trainer = await onnxgrad.Trainer.create(ort, artifacts, { session: { intraOpNumThreads: 1 } });
  const losses = [];
  for (const batch of batches) losses.push(await trainer.step(batch));
  const again = await onnxgrad.Trainer.create(ort, artifacts, { session: { intraOpNumThreads: 1 } });
  await again.step(batches[0]);
  const first = performance.now();
  for (const batch of batches.slice(0, 100)) await again.step(batch);
  const milliseconds = (performance.now() - first) / 100;
  await again.release();
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
    milliseconds,
    predicted: [...logits.data],
    exported: [...exported.data],
    evaluated: [...evaluated.outputs.logits.data],
    evaluatedLoss: evaluated.loss,
    checkpoint,
    model,
  };
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
