/** A trajectory's tokens: their text, with log-probabilities, loss mask and policy versions on the very tokens. */

import type { JSX } from "preact";
import { useCallback, useEffect, useMemo, useRef, useState } from "preact/hooks";
import { type CallError, Calls } from "../../api/calls";
import type { Brief, Tokens } from "../../api/types";
import { Empty, Failure } from "../../parts/feedback";
import { Choice } from "../../parts/fields";
import { wordOf, wholeOf } from "../../state/place";
import { asCallError } from "../../state/resource";
import { useLocation, useServices } from "../../state/services";
import { segmentNames } from "./talks";
import { SHADE_ENDS, shadeName } from "../../tokens/logprobs";
import { visible } from "../../text/visible";
import { WindowedList } from "../../window/WindowedList";
import { type Colouring, TokenLine, tokenOfEvent } from "./TokenLine";
import { TokenDetail } from "./TokenDetail";
import { TokenStore } from "./tokenStore";

/** Pixels; the style sheet says the same. */
const LINE = 20;
const COLOURINGS: readonly [Colouring, ...Colouring[]] = ["logprob", "mask", "version"];
/** Milliseconds after the width has changed last, before lines are broken again. */
const RESIZE_PAUSE = 150;

/** A token's place: the number of its segment, and its position from the segment's first prompt token. */
export interface TokenPlace {
  segment: number;
  position: number;
}

export function TokensTab({ brief, namespace, name }: { brief: Brief; namespace: string; name: string }): JSX.Element {
  const { calls, router } = useServices();
  const { query } = useLocation();
  const colouring = wordOf(query, "colour", COLOURINGS);
  const holder = useRef<HTMLDivElement | null>(null);
  const probe = useRef<HTMLSpanElement>(null);
  const [, draw] = useState(0);
  const [problem, setProblem] = useState<CallError | null>(null);
  const [hovered, setHovered] = useState<TokenPlace | null>(null);
  const window_ = useRef<[number, number]>([0, 60]);
  const path = Calls.job(name, "rollouts", brief.id, "tokens");
  const segment = wholeOf(query, "segment", 0, brief.segments.length - 1);
  const position = wholeOf(query, "token", 0, 1e9);
  const selected = useMemo(() => (position === null ? null : { segment: segment ?? 0, position }), [segment, position]);

  const redraw = useCallback(() => draw((before) => before + 1), []);
  const names = segmentNames(brief);
  const store = useMemo(
    () =>
      new TokenStore(
        brief.segments.map((segment, index) => ({ ...segment, name: names[index] ?? null })),
        100,
        (chunk, signal) =>
          calls.get<Tokens>(path, { namespace, segment: chunk.segment, start: chunk.start, limit: chunk.end - chunk.start, texts: true }, signal),
        (first, more) => {
          setProblem(null);
          // What is read stays where it is on the screen, though rows above it became more or fewer.
          const list = holder.current;
          if (list && more !== 0 && (first + 1) * LINE < list.scrollTop) list.scrollTop += more * LINE;
          redraw();
          store.want(...window_.current);
        },
        (error) => setProblem(asCallError(error)),
      ),
    [brief.id],
  );
  useEffect(() => () => store.close(), [store]);

  const measure = useCallback(() => {
    const width = probe.current?.getBoundingClientRect().width ?? 0;
    const room = (holder.current?.clientWidth ?? 0) - 24;
    if (width > 0 && room > 0) {
      store.resize(Math.max(20, Math.floor(room / (width / 100))));
      redraw();
    }
  }, [store, redraw]);
  useEffect(() => {
    measure();
    let timer: ReturnType<typeof setTimeout> | undefined;
    const observer = new ResizeObserver(() => {
      clearTimeout(timer);
      timer = setTimeout(measure, RESIZE_PAUSE);
    });
    if (holder.current) observer.observe(holder.current);
    return () => {
      clearTimeout(timer);
      observer.disconnect();
    };
  }, [measure]);

  const select = (place: TokenPlace | null) => router.change({ segment: place?.segment ?? null, token: place?.position ?? null }, true);
  useEffect(() => {
    if (selected) void reveal(store, holder, selected, redraw);
  }, [store, selected]);
  const move = (event: KeyboardEvent) => {
    const steps: Record<string, number> = { ArrowRight: 1, ArrowLeft: -1 };
    const step = steps[event.key];
    if (event.key === "Escape") select(null);
    if (step === undefined) return;
    event.preventDefault();
    const now = selected ?? { segment: 0, position: -1 };
    const next = { segment: now.segment, position: now.position + step };
    if (store.rows.find(next.segment, next.position) >= 0) select(next);
  };

  if (store.chunks.length === 0) {
    return (
      <Empty title="This rollout has no tokens.">
        <p>It ended before its first turn.</p>
      </Empty>
    );
  }
  const textless = store.data(0)?.textless;
  const shown = hovered ?? selected;
  return (
    <div class="tokens">
      <div class="filters">
        <Choice
          label="Colour"
          value={colouring}
          choices={[
            ["logprob", "log-probability"],
            ["mask", "loss mask"],
            ["version", "policy version"],
          ]}
          onChange={(value) => router.change({ colour: value === "logprob" ? null : value })}
        />
        <TokenLegend colouring={colouring} />
      </div>
      {textless ? <p class="notice">Tokens are shown by their ids: {visible(textless)}</p> : null}
      {problem ? (
        <Failure
          problem={problem}
          retry={() => {
            setProblem(null);
            store.want(...window_.current);
          }}
        />
      ) : null}
      <span ref={probe} class="token-probe mono" aria-hidden="true">
        {"0".repeat(100)}
      </span>
      <WindowedList
        rows={store.rows.length}
        rowHeight={LINE}
        spare={8}
        role="group"
        label="Tokens. Left and right arrow keys choose one."
        class="token-lines mono"
        holder={holder}
        row={(index) => <TokenLine key={index} row={store.rows.at(index)} store={store} colouring={colouring} selected={selected} />}
        onWindow={(first, end) => {
          window_.current = [first, end];
          store.want(first, end);
        }}
        onKeyDown={move}
        onMouseMove={(event) => setHovered(tokenOfEvent(event, store))}
        onClick={(event) => {
          const place = tokenOfEvent(event, store);
          if (place) select(place);
        }}
      />
      <TokenDetail place={shown} pinned={hovered === null} store={store} brief={brief} path={path} namespace={namespace} />
    </div>
  );
}

/** Read a token's chunk and scroll to its line. */
async function reveal(store: TokenStore, holder: { current: HTMLDivElement | null }, place: TokenPlace, redraw: () => void): Promise<void> {
  const index = store.rows.find(place.segment, place.position);
  const chunk = store.chunks[index];
  if (!chunk) return;
  await store.need(index);
  const list = holder.current;
  if (!list) return;
  const top = store.rows.rowOf(index, place.position - chunk.start) * LINE;
  redraw();
  requestAnimationFrame(() => {
    if (top < list.scrollTop || top + 2 * LINE > list.scrollTop + list.clientHeight) list.scrollTop = Math.max(0, top - list.clientHeight / 3);
  });
}

function TokenLegend({ colouring }: { colouring: Colouring }): JSX.Element {
  return (
    <ul class="legend" aria-label="Looks of tokens">
      {colouring === "logprob"
        ? SHADE_ENDS.map((_, shade) => (
            <li key={shade}>
              <span class={`t s lp${shade}`}>{shadeName(shade)}</span>
            </li>
          ))
        : null}
      {colouring === "mask" ? (
        <li>
          <span class="t s mask">sampled: mask 1</span>
        </li>
      ) : null}
      {colouring === "version" ? (
        <li>
          <span class="t s ver0">one</span> <span class="t s ver1">colour</span> <span class="t s ver2">a version</span>
        </li>
      ) : null}
      <li>
        <span class="t">plain: not sampled, or not trained on; mask 0</span>
      </li>
    </ul>
  );
}
