/** Files of Node; what browsers have too is in "onnxgrad". */
import { readFile, rename, rm, writeFile } from "node:fs/promises";
import { join } from "node:path";

import type { Store } from "./trainer.js";

/** Return the source of `loadArtifacts` for a folder on the disk. */
export function readFolder(folder: string): (name: string) => Promise<Uint8Array> {
  return async (name) => new Uint8Array(await readFile(join(folder, name)));
}

/** Return a store that is a safetensors file; a new state replaces it at once, or not at all. */
export function fileStore(path: string): Store {
  return {
    async read() {
      try {
        return new Uint8Array(await readFile(path));
      } catch (error) {
        if ((error as NodeJS.ErrnoException).code === "ENOENT") return undefined;
        throw error;
      }
    },
    async write(bytes) {
      const partial = `${path}.${process.pid}.partial`;
      try {
        await writeFile(partial, bytes, { flush: true } as object);
        await rename(partial, path);
      } catch (error) {
        await rm(partial, { force: true });
        throw error;
      }
    },
  };
}
