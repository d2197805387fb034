/** Light, dark, or what the system prefers. */

export type Theme = "system" | "light" | "dark";
const KEY = "rollyard-theme";

export function savedTheme(): Theme {
  try {
    const saved = window.localStorage.getItem(KEY);
    return saved === "light" || saved === "dark" ? saved : "system";
  } catch {
    // A browser may forbid storage; the system's preference holds then.
    return "system";
  }
}

/** Apply a theme, and keep it for the next visit. */
export function applyTheme(theme: Theme): void {
  const root = document.documentElement;
  if (theme === "system") delete root.dataset["theme"];
  else root.dataset["theme"] = theme;
  try {
    if (theme === "system") window.localStorage.removeItem(KEY);
    else window.localStorage.setItem(KEY, theme);
  } catch {
    // Without storage the choice holds until the page is left.
  }
}

/** Return the theme that follows a theme when the reader asks for another. */
export function nextTheme(theme: Theme): Theme {
  return theme === "system" ? "dark" : theme === "dark" ? "light" : "system";
}
