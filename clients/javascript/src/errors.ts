/** What this package refuses; the message names the thing and the remedy. */
export class OnnxgradError extends Error {
  override name = "OnnxgradError";
}

/** A step whose loss or new values are NaN or infinite. The state is that before the step. */
export class NotFiniteError extends OnnxgradError {
  override name = "NotFiniteError";
}

/** Return `[2, 3]`, with `?` for a length that is not known; null is any shape. */
export function printedShape(shape: readonly (number | string | null)[] | null): string {
  if (!shape) return "of any shape";
  return `[${shape.map((length) => length ?? "?").join(", ")}]`;
}
