/** The sheet that a visitor draws on, and the picture that the network gets of it. */

export const SIDE = 8;
const DETAIL = 4; // the digits of scikit-learn count the black of 4 x 4 points a pixel
const STEP = 10;

type Point = { x: number; y: number };

/** A sheet to draw on with a pointer or the keyboard; `changed` is called after every stroke. */
export class Sheet {
  readonly #canvas: HTMLCanvasElement;
  readonly #context: CanvasRenderingContext2D;
  readonly #changed: () => void;
  #strokes: Point[][] = [];
  #pen: Point;
  #down = false; // the pen of the keyboard

  constructor(canvas: HTMLCanvasElement, changed: () => void) {
    this.#canvas = canvas;
    this.#context = canvas.getContext("2d", { willReadFrequently: true })!;
    this.#changed = changed;
    this.#pen = { x: canvas.width / 2, y: canvas.height / 4 };
    canvas.addEventListener("pointerdown", (event) => this.#begin(event));
    canvas.addEventListener("pointermove", (event) => this.#move(event));
    canvas.addEventListener("keydown", (event) => this.#key(event));
    canvas.addEventListener("focus", () => this.#draw());
    canvas.addEventListener("blur", () => this.#draw());
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.#draw());
  }

  get empty(): boolean {
    return this.#strokes.length === 0;
  }

  clear(): void {
    this.#strokes = [];
    this.#down = false;
    this.#draw();
    this.#changed();
  }

  /** Return the drawing as the network knows digits: 8 x 8 values of 0 to 1, in the middle. */
  pixels(): Float32Array {
    const fine = SIDE * DETAIL;
    const points = this.#strokes.flat();
    const [left, right] = [Math.min(...points.map((p) => p.x)), Math.max(...points.map((p) => p.x))];
    const [top, bottom] = [Math.min(...points.map((p) => p.y)), Math.max(...points.map((p) => p.y))];
    const pen = fine * 0.13;
    const scale = (fine - pen) / Math.max(bottom - top, right - left, 30);
    const small = new OffscreenCanvas(fine, fine).getContext("2d")!;
    small.translate(fine / 2, fine / 2);
    small.scale(scale, scale);
    small.translate(-(left + right) / 2, -(top + bottom) / 2);
    small.lineWidth = pen / scale;
    trace(small, this.#strokes);
    const { data } = small.getImageData(0, 0, fine, fine);
    const pixels = new Float32Array(SIDE * SIDE);
    for (let i = 0; i < fine * fine; i++) {
      const cell = Math.floor(i / fine / DETAIL) * SIDE + Math.floor((i % fine) / DETAIL);
      pixels[cell]! += data[4 * i + 3]! / 255 / DETAIL ** 2; // the opacity
    }
    return pixels;
  }

  #begin(event: PointerEvent): void {
    if (event.button !== 0) return;
    this.#canvas.setPointerCapture(event.pointerId);
    this.#strokes.push([this.#at(event)]);
    this.#draw();
    this.#changed();
  }

  #move(event: PointerEvent): void {
    if (!this.#canvas.hasPointerCapture(event.pointerId)) return;
    for (const one of event.getCoalescedEvents?.() ?? [event]) this.#strokes.at(-1)!.push(this.#at(one));
    this.#draw();
    this.#changed();
  }

  #at(event: PointerEvent): Point {
    const box = this.#canvas.getBoundingClientRect();
    const inner = this.#canvas.clientWidth; // without the border
    const border = (box.width - inner) / 2;
    const scale = this.#canvas.width / inner;
    return { x: (event.clientX - box.left - border) * scale, y: (event.clientY - box.top - border) * scale };
  }

  #key(event: KeyboardEvent): void {
    const move = { ArrowLeft: [-STEP, 0], ArrowRight: [STEP, 0], ArrowUp: [0, -STEP], ArrowDown: [0, STEP] }[event.key];
    if (event.key === "Delete" || event.key === "Backspace") this.clear();
    else if (event.key === " ") {
      this.#down = !this.#down;
      if (this.#down) this.#strokes.push([{ ...this.#pen }]);
    } else if (move) {
      const inside = (at: number) => Math.min(Math.max(at, STEP), this.#canvas.width - STEP);
      this.#pen = { x: inside(this.#pen.x + move[0]!), y: inside(this.#pen.y + move[1]!) };
      if (this.#down) this.#strokes.at(-1)!.push({ ...this.#pen });
    } else return;
    event.preventDefault();
    this.#draw();
    this.#changed();
  }

  #draw(): void {
    const { width, height } = this.#canvas;
    this.#context.clearRect(0, 0, width, height);
    this.#context.lineWidth = width / 13;
    const style = getComputedStyle(this.#canvas);
    this.#context.strokeStyle = style.getPropertyValue("--ink");
    trace(this.#context, this.#strokes);
    if (!this.#canvas.matches(":focus-visible")) return;
    this.#context.lineWidth = 3;
    this.#context.strokeStyle = style.getPropertyValue("--accent");
    this.#context.beginPath();
    this.#context.arc(this.#pen.x, this.#pen.y, this.#down ? 5 : 11, 0, 7);
    this.#context.stroke();
  }
}

function trace(context: CanvasRenderingContext2D | OffscreenCanvasRenderingContext2D, strokes: readonly Point[][]): void {
  context.lineCap = context.lineJoin = "round";
  for (const [first, ...others] of strokes) {
    context.beginPath();
    context.moveTo(first!.x, first!.y);
    for (const { x, y } of others.length ? others : [first!]) context.lineTo(x, y);
    context.stroke();
  }
}

/** Show 8 x 8 values on a canvas of that size, white on black. */
export function showPixels(canvas: HTMLCanvasElement, pixels: Float32Array): void {
  const image = new ImageData(SIDE, SIDE);
  pixels.forEach((value, i) => image.data.set([value * 255, value * 255, value * 255, 255], 4 * i));
  canvas.getContext("2d")!.putImageData(image, 0, 0);
}
