/** Fields of filters. What is typed reaches the address after a short pause. */

import type { JSX } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";

/** Milliseconds after the last letter. */
const PAUSE = 250;

interface FieldProps {
  value: string;
  label: string;
  onChange: (text: string) => void;
}

/** Return the text of a field and what its input does; Enter does not wait. */
function useTyped({ value, onChange }: FieldProps) {
  const [text, setText] = useState(value);
  const timer = useRef<ReturnType<typeof setTimeout> | undefined>(undefined);
  const current = useRef(onChange);
  current.current = onChange;
  useEffect(() => setText(value), [value]);
  useEffect(() => () => clearTimeout(timer.current), []);
  const type = (event: Event) => {
    const typed = (event.currentTarget as HTMLInputElement).value;
    setText(typed);
    clearTimeout(timer.current);
    timer.current = setTimeout(() => current.current(typed), PAUSE);
  };
  const enter = (event: KeyboardEvent) => {
    if (event.key !== "Enter") return;
    clearTimeout(timer.current);
    current.current((event.currentTarget as HTMLInputElement).value);
  };
  return { text, type, enter };
}

export function Search(props: FieldProps): JSX.Element {
  const { text, type, enter } = useTyped(props);
  return (
    <input
      type="search"
      value={text}
      placeholder={props.label}
      aria-label={props.label}
      title={`${props.label} (/)`}
      maxLength={200}
      spellcheck={false}
      onInput={type}
      onKeyDown={enter}
    />
  );
}

export function NumberField(props: FieldProps): JSX.Element {
  const { text, type, enter } = useTyped(props);
  return <input class="short" type="number" step="any" value={text} placeholder={props.label} aria-label={props.label} onInput={type} onKeyDown={enter} />;
}

export interface ChoiceProps {
  label: string;
  value: string;
  choices: readonly (readonly [value: string, name: string])[];
  onChange: (value: string) => void;
}

export function Choice({ label, value, choices, onChange }: ChoiceProps): JSX.Element {
  return (
    <label class="choice">
      <span>{label}</span>
      <select value={value} onChange={(event) => onChange(event.currentTarget.value)}>
        {choices.map(([id, name]) => (
          <option key={id} value={id}>
            {name}
          </option>
        ))}
      </select>
    </label>
  );
}
