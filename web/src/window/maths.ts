/** Which rows of a long list are drawn: all rows have one height. */

/** Browsers lose elements past about 33 million pixels; half of that is safe in all of them. */
export const MOST_PIXELS = 16_000_000;

export interface Window {
  /** The first row that is drawn. */
  first: number;
  /** One past the last row that is drawn. */
  end: number;
  /** Pixels above the first row. */
  above: number;
  /** The height of the whole list in pixels. */
  height: number;
}

/**
 * Return the rows to draw.
 *
 * Where all rows together are higher than `MOST_PIXELS`, the list is that high, and its scroll position is
 * translated: the fraction that was scrolled is the fraction of rows that have passed.
 */
export function windowOf(rows: number, rowHeight: number, scrolled: number, viewHeight: number, spare: number): Window {
  const natural = rows * rowHeight;
  const height = Math.min(natural, MOST_PIXELS);
  const top = Math.max(0, Math.min(scrolled, Math.max(0, height - viewHeight)));
  const room = Math.max(1, height - viewHeight);
  const offset = natural <= MOST_PIXELS ? top : (top / room) * (natural - viewHeight);
  const firstSeen = Math.floor(offset / rowHeight);
  const first = Math.max(0, firstSeen - spare);
  const end = Math.min(rows, Math.ceil((offset + viewHeight) / rowHeight) + spare);
  const above = top - (offset - first * rowHeight);
  return { first, end: Math.max(first, end), above: Math.max(0, above), height };
}

/** Return the scroll position at which a row can be seen, changed as little as possible. */
export function scrollFor(row: number, rows: number, rowHeight: number, scrolled: number, viewHeight: number): number {
  const natural = rows * rowHeight;
  if (natural > MOST_PIXELS) {
    const fraction = (row * rowHeight) / Math.max(1, natural - viewHeight);
    return Math.min(1, fraction) * (MOST_PIXELS - viewHeight);
  }
  const top = row * rowHeight;
  if (top < scrolled) return top;
  return top + rowHeight > scrolled + viewHeight ? top + rowHeight - viewHeight : scrolled;
}
