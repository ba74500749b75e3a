import type { Store } from "./trainer.js";

const TABLE = "states";

/** Return a store in the browser's IndexedDB, which stays when the page is closed. */
export function browserStore(key: string, database = "onnxgrad"): Store {
  return {
    read: () => inTable(database, "readonly", (table) => table.get(key)),
    write: async (bytes) => void (await inTable(database, "readwrite", (table) => table.put(bytes, key))),
  };
}

/** Resolve with the result of a request when its transaction is complete. */
async function inTable<T>(database: string, mode: IDBTransactionMode, ask: (table: IDBObjectStore) => IDBRequest<T>): Promise<T> {
  const opened = indexedDB.open(database, 1);
  opened.onupgradeneeded = () => opened.result.createObjectStore(TABLE);
  const db = await new Promise<IDBDatabase>((resolve, reject) => {
    opened.onsuccess = () => resolve(opened.result);
    opened.onerror = () => reject(opened.error);
  });
  try {
    return await new Promise<T>((resolve, reject) => {
      const transaction = db.transaction(TABLE, mode);
      const request = ask(transaction.objectStore(TABLE));
      transaction.oncomplete = () => resolve(request.result);
      transaction.onabort = transaction.onerror = () => reject(transaction.error);
    });
  } finally {
    db.close();
  }
}
