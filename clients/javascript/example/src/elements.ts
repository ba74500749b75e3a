/** Parts of the page. */
import type { Example } from "./data.js";
import { showPixels, SIDE } from "./drawing.js";

export function byId<T extends HTMLElement>(id: string): T {
  return document.getElementById(id) as T;
}

export function say(text: string, bad = false): void {
  byId("status").textContent = text;
  byId("status").classList.toggle("bad", bad);
}

/** Build ten bars; return what shows scores in them, or none. */
export function buildBars(list: HTMLElement): (scores: Float32Array | undefined) => void {
  const bars = Array.from({ length: 10 }, (_, digit) => {
    const item = document.createElement("li");
    item.innerHTML = `<span>${digit}</span><div class="track"><div class="fill"></div></div><span class="share"></span>`;
    list.append(item);
    return item;
  });
  return (scores) => {
    const top = scores ? Math.max(...scores) : 0;
    const powers = scores ? Array.from(scores, (x) => Math.exp(x - top)) : [];
    const total = powers.reduce((sum, x) => sum + x, 0);
    bars.forEach((item, digit) => {
      const share = scores ? powers[digit]! / total : 0;
      item.classList.toggle("best", scores?.[digit] === top && scores !== undefined);
      item.querySelector<HTMLElement>(".fill")!.style.width = `${100 * share}%`;
      item.querySelector(".share")!.textContent = scores ? `${(100 * share).toFixed(0)} %` : "–";
    });
    byId("best").textContent = scores ? `${scores.indexOf(top)}` : "";
    byId("looks").textContent = scores ? `The network sees: ${scores.indexOf(top)}` : "What the network sees";
  };
}

export function buildLabels(group: HTMLElement, add: (label: number) => void): void {
  for (let digit = 0; digit < 10; digit++) {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = String(digit);
    button.addEventListener("click", () => add(digit));
    group.append(button);
  }
}

/** Return an example of the visitor as an item of a list, which a click removes. */
export function exampleItem({ pixels, label }: Example, remove: () => void): HTMLLIElement {
  const item = document.createElement("li");
  const button = document.createElement("button");
  const picture = document.createElement("canvas");
  picture.width = picture.height = SIDE;
  showPixels(picture, pixels);
  button.type = "button";
  button.title = "Remove";
  button.setAttribute("aria-label", `Remove this example of the digit ${label}`);
  button.append(picture, String(label));
  button.addEventListener("click", remove);
  item.append(button);
  return item;
}

export function download(bytes: Uint8Array, name: string): void {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([bytes as Uint8Array<ArrayBuffer>]));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
  say(`Downloading ${name}, ${(bytes.length / 1024).toFixed(0)} kB.`);
}
