/** Dialogs: the browser's own element traps the focus and closes on Escape. */

import type { ComponentChildren, JSX } from "preact";
import { useEffect, useRef } from "preact/hooks";

export function Dialog({ title, onClose, children }: { title: string; onClose: () => void; children: ComponentChildren }): JSX.Element {
  const element = useRef<HTMLDialogElement>(null);
  useEffect(() => {
    const dialog = element.current;
    if (dialog && !dialog.open) dialog.showModal();
  }, []);
  return (
    <dialog ref={element} onClose={onClose} aria-labelledby="dialog-title">
      <h2 id="dialog-title">{title}</h2>
      {children}
    </dialog>
  );
}

const KEYS: readonly [keys: string, what: string][] = [
  ["?", "this list"],
  ["g", "overview"],
  ["u", "one level up: from a rollout to its group, then its job"],
  ["/", "search field"],
  ["[ and ]", "previous and next sample"],
  ["{ and }", "previous and next failed sample"],
  ["1 to 5", "a rollout's or a job's tabs"],
  ["arrow keys", "move in the grid of groups, between tabs and between tokens"],
  ["Enter", "open what has the focus"],
  ["d", "light, dark, or as the system prefers"],
  ["Escape", "close a dialog"],
];

export function KeysHelp({ onClose }: { onClose: () => void }): JSX.Element {
  return (
    <Dialog title="Keys" onClose={onClose}>
      <table class="keys">
        <tbody>
          {KEYS.map(([keys, what]) => (
            <tr key={keys}>
              <th scope="row">
                <kbd>{keys}</kbd>
              </th>
              <td>{what}</td>
            </tr>
          ))}
        </tbody>
      </table>
      <form method="dialog">
        <button>Close</button>
      </form>
    </Dialog>
  );
}
