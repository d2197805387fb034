/** Arrow keys in the grid of groups: the focus moves between links of rows, and the list scrolls along. */

import { scrollFor } from "../../window/maths";

/** Rows that Page Up and Page Down pass. */
const PAGE = 15;

/** Move the focus by a key, if the key means something in a grid. */
export function moveInGrid(event: KeyboardEvent, list: HTMLElement | null, rows: number, rowHeight: number): void {
  if (list === null || event.ctrlKey || event.altKey || event.metaKey) return;
  const focused = document.activeElement as HTMLElement | null;
  const row = focused?.closest<HTMLElement>("[data-row]") ?? null;
  const now = row === null ? Math.ceil(list.scrollTop / rowHeight) - 1 : Number(row.dataset["row"]);
  const column = row === null ? 0 : linksOf(row).indexOf(focused as HTMLElement);
  const targets: Record<string, [row: number, column: number]> = {
    ArrowDown: [now + 1, column],
    ArrowUp: [now - 1, column],
    ArrowRight: [now, column + 1],
    ArrowLeft: [now, column - 1],
    PageDown: [now + PAGE, column],
    PageUp: [now - PAGE, column],
    Home: [0, column],
    End: [rows - 1, column],
  };
  const target = targets[event.key];
  if (!target) return;
  event.preventDefault();
  const goal = Math.max(0, Math.min(rows - 1, target[0]));
  // The header stays at the top of the list and covers a row's height.
  list.scrollTop = scrollFor(goal, rows, rowHeight, list.scrollTop, list.clientHeight - rowHeight);
  focusRow(list, goal, Math.max(0, target[1]), 8);
}

/** Focus a row's link when the list has drawn it, within so many frames. */
function focusRow(list: HTMLElement, row: number, column: number, frames: number): void {
  const element = list.querySelector<HTMLElement>(`[data-row="${row}"]`);
  if (element) {
    const links = linksOf(element);
    links[Math.min(column, links.length - 1)]?.focus({ preventScroll: true });
  } else if (frames > 0) requestAnimationFrame(() => focusRow(list, row, column, frames - 1));
}

function linksOf(row: HTMLElement): HTMLElement[] {
  return [...row.querySelectorAll<HTMLElement>("a[href]")];
}
