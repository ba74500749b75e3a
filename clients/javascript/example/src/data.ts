/** The images that the page trains and measures with. */
import { readSafetensors } from "onnxgrad";

import { SIDE } from "./drawing.js";

const SIZE = SIDE * SIDE;

export interface Example {
  pixels: Float32Array;
  label: number;
}

export interface Digits {
  known: Example[];
  heldOut: Example[];
}

export async function loadDigits(address: string): Promise<Digits> {
  const response = await fetch(address);
  if (!response.ok) throw new Error(`${address} answers ${response.status}`);
  const { tensors, metadata } = readSafetensors(new Uint8Array(await response.arrayBuffer()));
  const labels = tensors.get("labels")!.data as Uint8Array;
  const pixels = Float32Array.from(tensors.get("images")!.data as Uint8Array, (x) => x / 16);
  const all = Array.from(labels, (label, i) => ({ label, pixels: pixels.subarray(i * SIZE, (i + 1) * SIZE) }));
  const count = all.length - Number(metadata.held_out);
  return { known: all.slice(0, count), heldOut: all.slice(count) };
}

/** Return examples as a batch of the network. */
export function batchOf(examples: readonly Example[]): { image: { data: Float32Array; shape: number[] }; label: number[] } {
  const data = new Float32Array(examples.length * SIZE);
  examples.forEach(({ pixels }, i) => data.set(pixels, i * SIZE));
  return { image: { data, shape: [examples.length, 1, SIDE, SIDE] }, label: examples.map(({ label }) => label) };
}

/** Return a batch at random: of both, half of the rows are the visitor's own. */
export function drawn(own: readonly Example[], known: readonly Example[], rows: number): Example[] {
  const one = (from: readonly Example[]) => from[Math.floor(Math.random() * from.length)]!;
  const ofOwn = known.length === 0 ? rows : own.length === 0 ? 0 : rows / 2;
  return Array.from({ length: rows }, (_, i) => one(i < ofOwn ? own : known));
}
