/** Tabs whose selection is a value of the address. */

import type { ComponentChildren, JSX } from "preact";
import { useRef } from "preact/hooks";

export interface TabsProps<T extends string> {
  label: string;
  tabs: readonly { id: T; name: string; extra?: string }[];
  selected: T;
  onSelect: (id: T) => void;
  children: ComponentChildren;
}

export function Tabs<T extends string>({ label, tabs, selected, onSelect, children }: TabsProps<T>): JSX.Element {
  const list = useRef<HTMLDivElement>(null);
  const move = (event: KeyboardEvent) => {
    const now = tabs.findIndex((tab) => tab.id === selected);
    const steps: Record<string, number> = { ArrowRight: now + 1, ArrowLeft: now - 1, Home: 0, End: tabs.length - 1 };
    const target = steps[event.key];
    if (target === undefined) return;
    event.preventDefault();
    const place = (target + tabs.length) % tabs.length;
    const tab = tabs[place];
    if (!tab) return;
    onSelect(tab.id);
    list.current?.querySelectorAll<HTMLElement>("[role=tab]")[place]?.focus();
  };
  return (
    <>
      <div class="tabs" role="tablist" aria-label={label} ref={list} onKeyDown={move}>
        {tabs.map((tab) => (
          <button
            key={tab.id}
            id={`tab-${tab.id}`}
            type="button"
            role="tab"
            aria-selected={tab.id === selected}
            aria-controls="tab-panel"
            tabIndex={tab.id === selected ? 0 : -1}
            onClick={() => onSelect(tab.id)}
          >
            {tab.name}
            {tab.extra ? <span class="tab-extra">{tab.extra}</span> : null}
          </button>
        ))}
      </div>
      <div class="tab-panel" id="tab-panel" role="tabpanel" aria-labelledby={`tab-${selected}`}>
        {children}
      </div>
    </>
  );
}
