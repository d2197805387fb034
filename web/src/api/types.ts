/**
 * The answers of the control plane that the page reads.
 *
 * Times are seconds since the epoch, durations are seconds, and a reward is null where no evaluation gave one.
 */

export type StageName = "init" | "run" | "eval";
export const STAGES: readonly StageName[] = ["init", "run", "eval"];

/** A page of a list; `continue` is absent or empty on the last one. */
export interface Page<T> {
  items: T[];
  metadata: { continue?: string | null; more?: number };
}

export interface Waiting {
  reason: string;
  message: string;
}

export interface StageLoad {
  queued: number;
  active: number;
  slots?: number | null;
}

export interface JobRow {
  namespace: string;
  name: string;
  uid: string;
  phase: string;
  created_at: number;
  started_at: number | null;
  finished_at: number | null;
  deadline_at: number | null;
  pool: string | null;
  suspended: boolean;
  total: number;
  succeeded: number;
  failed: number;
  cancelled: number;
  stages: Partial<Record<StageName, StageLoad>>;
  reward_mean: number | null;
  late: number | null;
  waits_for: Waiting | null;
}

export interface Backend {
  url: string;
  ready: boolean;
  circuit: string | null;
  weights: string | null;
  policy_version: string | null;
  active: number;
  max_active: number | null;
  speed: number | null;
  kv_hits: number | null;
  message: string;
}

export interface Pool {
  namespace: string;
  name: string;
  model: string;
  phase: string;
  policy_version: string | null;
  paused: boolean;
  backends: Backend[];
}

export interface FleetNode {
  name: string;
  heard_at: number | null;
  workers: number;
  active: number;
}

export interface LastError {
  time: number;
  reason: string;
  message: string;
  rollout: string;
}

export interface Worker {
  name: string;
  node: string;
  /** The job and its namespace are null if the worker's token reaches every job. */
  namespace: string | null;
  job: string | null;
  stages: string[];
  active: number;
  heard_at: number | null;
  last_error: LastError | null;
}

export interface Rates {
  bucket_seconds: number;
  start: number;
  rollouts: number[];
  tokens: number[];
}

export interface Overview {
  time: number;
  phases: Record<string, number>;
  queues: Partial<Record<StageName, StageLoad>>;
  rates: Rates;
  pools: Pool[];
  nodes?: FleetNode[];
  workers?: Worker[];
  more?: number;
}

/** One rollout in a list. */
export interface RolloutRow {
  id: string;
  task_id: string;
  sample: number;
  status: string;
  stage: string | null;
  reason: string;
  reward: number | null;
  since: number | null;
  ended_at: number | null;
  seconds: number | null;
  tokens: number | null;
  attempts: number;
  worker: string | null;
  node: string | null;
  policy_version: string | null;
  namespace?: string;
  job?: string;
}

/** A sample in the grid: its id without the page's prefix, a letter (q queued, l leased, s succeeded, f failed, c cancelled), its reward. */
export type GridSample = [id: string, letter: string, reward: number | null];

export interface GridRow {
  no: number;
  task_id: string;
  state: string;
  informative: boolean | null;
  delivered: boolean | null;
  reason: string;
  mean: number | null;
  samples: GridSample[];
}

export interface GridPage extends Page<GridRow> {
  /** The beginning of the ids of all samples. */
  prefix: string;
}

export interface Statistics {
  upto: number;
  rewards: { bins: number[]; min: number | null; max: number | null; n: number; mean: number | null; zeros: number; ones: number };
  by_version: { version: string; index: number; n: number; mean: number | null }[];
  by_time: { start: number; n: number; mean: number | null; tokens: number }[];
  failures: { reason: string; n: number; stage: string | null; example: string | null }[];
  truncated: { reason: string; n: number }[];
  stages: Partial<Record<StageName, { queued: number; active: number; n: number }>>;
  model_seconds: number;
  tool_seconds: number;
  own_seconds: number;
  tokens: number;
  tool_calls?: number;
}

export type Span = [name: string, start: number, end: number];

export interface GanttRow {
  id: string;
  task_id: string;
  sample: number;
  status: string;
  reward: number | null;
  open?: boolean;
  spans: Span[];
}

export interface Condition {
  type: string;
  status: string;
  reason?: string;
  message?: string;
  lastTransitionTime?: string;
}

/** The parts of the resource RolloutJob that the page shows. */
export interface RolloutJob {
  metadata: { name: string; namespace: string; uid?: string; creationTimestamp?: string };
  spec: {
    handler?: string;
    samplesPerTask?: number;
    backendRef?: { name: string } | null;
    suspend?: boolean;
    priority?: number;
    activeDeadlineSeconds?: number | null;
    agent?: { type?: string; maxTurns?: number };
  };
  status: {
    phase: string;
    message?: string;
    conditions?: Condition[];
    startTime?: string | null;
    completionTime?: string | null;
    rewardMean?: number | null;
    counts?: Record<string, unknown>;
    skippedRows?: SkippedRows | null;
    advice?: Advice[];
  };
}

/** What the ended rollouts of a job show about its settings, and what to do about it. */
export interface Advice {
  reason: string;
  message: string;
}

/** Rows of the task list that are no tasks and were left out, and why the first of them are none. */
export interface SkippedRows {
  count: number;
  read: number;
  reasons: string[];
}

export interface Attempt {
  stage: string;
  attempt: number;
  reason: string;
  message: string;
  worker: string;
  node: string;
  started: number;
  seconds: number;
  counted: boolean;
}

export interface StageTiming {
  queued_seconds: number;
  active_seconds: number;
  attempts: number;
}

export interface Timings extends Record<StageName, StageTiming> {
  model_seconds: number;
  tool_seconds: number;
  own_seconds: number;
}

export interface TurnToolCall {
  name: string;
  error?: string | null;
  seconds?: number;
}

export interface Turn {
  segment: number;
  start: number;
  end: number;
  finish_reason: string;
  tool_calls: TurnToolCall[];
  model_seconds: number;
  tool_seconds: number;
}

/** A conversation of a rollout beside its own one, without its messages. */
export interface Branch {
  number: number;
  kind: string;
  trained: boolean;
  parent: number | null;
  /** How many messages of the parent precede its own messages. */
  shared: number;
  messages: number;
  turns: Turn[];
  turns_total?: number;
}

/** How a harness ended. The policy may have written any of its texts. */
export interface HarnessEnd {
  name: string;
  exit_code: number | null;
  seconds: number;
  output: string;
  log: string;
}

/** A trajectory without its tokens and messages. */
export interface Brief {
  id: string;
  job: string;
  namespace: string;
  task_id: string;
  group_id?: string;
  sample_index: number;
  attempt?: number;
  status: string;
  reason: string;
  message: string;
  reward: number | null;
  reward_components: Record<string, number>;
  reward_reason: string;
  /** The end of what the evaluation printed. The policy's program may have written it. */
  reward_output: string;
  sampling: Record<string, unknown> | null;
  timings: Timings;
  attempts: Attempt[];
  attempts_dropped: number;
  turns: Turn[];
  /** The number of turns; `turns` holds the first of them. */
  turns_total?: number;
  backend: string;
  /** What read the tool calls; it is empty if the model was offered no tools. */
  tool_parser: string;
  truncated: boolean;
  truncated_reason: string;
  template_breaks: number;
  metadata: Record<string, unknown>;
  spans: Span[];
  /** The tokens of each segment's prompt and response, and those of the response that are in the loss mask. */
  segments: { prompt: number; response: number; sampled: number }[];
  messages: number;
  /** The number of the rollout's own conversation. */
  conversation: number;
  /** The number of the branch that the own conversation has rewritten. */
  continues: number | null;
  branches: Branch[];
  harness: HarnessEnd | null;
  neighbours: Neighbours;
  trace_id: string | null;
}

export interface Neighbours {
  sample_before?: string | null;
  sample_after?: string | null;
  failed_before?: string | null;
  failed_after?: string | null;
}

export interface MessageCall {
  name: string;
  arguments: string;
  cut?: boolean;
}

export interface Message {
  role: string;
  content: string | null;
  characters: number;
  cut: boolean;
  reasoning_content?: string;
  tool_calls?: MessageCall[] | null;
  tool_call_id?: string | null;
  turn: number | null;
}

export interface Messages {
  start: number;
  total: number;
  items: Message[];
}

export interface MessageText {
  text: string;
  offset: number;
  characters: number;
}

/** Values with the length of their runs. */
export type Runs<T> = [value: T, length: number][];

export interface Tokens {
  segment: number;
  start: number;
  total: number;
  prompt: number;
  ids: number[];
  texts: string[] | null;
  texts_reason?: string | null;
  mask: Runs<number>;
  versions: Runs<string>;
  logprobs: string | number[];
}

export interface DifferenceSide {
  start?: number;
  ids: number[];
  texts: string[] | null;
}

export interface Difference {
  segment: number | null;
  position: number | null;
  left: DifferenceSide;
  right: DifferenceSide;
}

export interface LiveTurn {
  no: number;
  role: string;
  text: string;
  tokens: number | null;
  seconds: number | null;
  tool_calls: { name: string; arguments?: string }[];
  /** Whether it is being sampled. The text is then the end of what has come so far. */
  running?: boolean;
}

export interface Live {
  id: string;
  status: string;
  stage: string | null;
  since: number | null;
  worker: string | null;
  turns: LiveTurn[];
  dropped: number;
  watched_until: number;
}

export interface Session {
  role: string;
  expires_at: number | null;
  cancel: boolean;
}
