/** The chart of the loss: one faint line of every step, one of the means of the last ones. */
import uPlot from "uplot";
import "uplot/dist/uPlot.min.css";

const RECENT = 20;

export class LossChart {
  readonly #element: HTMLElement;
  #plot: uPlot | undefined;
  #steps: number[] = [];
  #losses: number[] = [];
  #means: number[] = [];

  constructor(element: HTMLElement) {
    this.#element = element;
    new ResizeObserver(() => this.#plot?.setSize(this.#size())).observe(element);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw(true));
  }

  clear(): void {
    this.#steps = [];
    this.#losses = [];
    this.#means = [];
    this.draw();
  }

  /** Add a step; return the mean of the last losses. */
  add(step: number, loss: number): number {
    this.#steps.push(step);
    this.#losses.push(loss);
    const recent = this.#losses.slice(-RECENT);
    const mean = recent.reduce((sum, x) => sum + x, 0) / recent.length;
    this.#means.push(mean);
    return mean;
  }

  draw(anew = false): void {
    const data: uPlot.AlignedData = [this.#steps, this.#losses, this.#means];
    if (anew) this.#plot = void this.#plot?.destroy();
    if (this.#plot) this.#plot.setData(data);
    else this.#plot = new uPlot(this.#options(), data, this.#element);
  }

  #size(): { width: number; height: number } {
    return { width: this.#element.clientWidth, height: this.#element.clientHeight };
  }

  #options(): uPlot.Options {
    const style = getComputedStyle(this.#element);
    const color = (name: string) => style.getPropertyValue(name);
    const axis = { stroke: color("--quiet"), font: "12px system-ui, sans-serif", grid: { stroke: color("--line"), width: 1 }, ticks: { show: false } };
    return {
      ...this.#size(),
      legend: { show: false },
      cursor: { show: false },
      padding: [10, 12, 0, 0],
      scales: { x: { time: false, range: (_, min, max) => [min ?? 0, Math.max(max ?? 0, (min ?? 0) + 10)] }, y: { range: (_, __, max) => [0, (max || 1) * 1.05] } },
      axes: [{ ...axis, size: 30, space: 60 }, { ...axis, size: 44, space: 36 }],
      series: [{}, { stroke: `color-mix(in srgb, ${color("--accent")} 35%, transparent)`, width: 1, points: { show: false } }, { stroke: color("--accent"), width: 2.5, points: { show: false } }],
    };
  }
}
