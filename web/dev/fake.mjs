/** Made-up answers of a control plane, for work on the page's looks without one. Nothing of this is shipped. */

const now = () => Date.now() / 1000;
const TASKS = Number(process.env.FAKE_TASKS ?? 12_500);
const SAMPLES = 8;
const LIMIT = 500;

/** A number from 0 to 1 that depends on whole numbers only. */
function noise(...seeds) {
  let value = 2166136261;
  for (const seed of seeds) value = Math.imul(value ^ (seed + 0x9e3779b9), 16777619) ^ (value >>> 13);
  return ((value >>> 0) % 10_007) / 10_007;
}

function job(name, phase, extra = {}) {
  const total = 512;
  const ended = phase === "Succeeded" ? total : 301;
  return {
    namespace: "default", name, uid: `uid-${name}`, phase, created_at: now() - 4000, started_at: now() - 3900,
    finished_at: phase === "Succeeded" ? now() - 600 : null, deadline_at: null, pool: "tiny-pool", suspended: false, total,
    succeeded: ended - 23, failed: 19, cancelled: 4,
    stages: { init: { queued: 12, active: 4 }, run: { queued: 80, active: 64 }, eval: { queued: 3, active: 2 } },
    reward_mean: 0.4312, late: null, waits_for: null, ...extra,
  };
}

const JOBS = () => [
  job("nightly-math", "Run", { late: 1830, deadline_at: now() + 300 }),
  job("repair-bugs", "Run"),
  job("waits-for-pool", "Pending", {
    succeeded: 0, failed: 0, cancelled: 0, stages: { init: { queued: 512, active: 0 } }, reward_mean: null, started_at: null,
    waits_for: { reason: "NoBackendReady", message: "None of the 2 backends of pool big-pool is ready: connection refused" },
  }),
  job("quickstart", "Succeeded"),
];

function sample(no, index) {
  const id = `r-${no}-${index}`;
  const letter = noise(no, index, 1) < 0.03 ? "f" : no > TASKS - 40 ? (index % 2 ? "q" : "l") : "s";
  return [id, letter, letter === "s" ? Math.round(noise(no, index, 2) * noise(no, 7) * 100) / 100 : null];
}

function group(no) {
  const samples = Array.from({ length: SAMPLES }, (_, index) => sample(no, index));
  const rewards = samples.map((item) => item[2]).filter((value) => value !== null);
  const mean = rewards.length ? rewards.reduce((a, b) => a + b, 0) / rewards.length : null;
  return {
    no, task_id: `math/level-${no % 5}/problem-${no}`, state: rewards.length === SAMPLES ? "ended" : "active",
    informative: new Set(rewards).size > 1 && noise(no, 3) > 0.3, delivered: false, reason: "", mean, samples,
  };
}

function rollout(no, index) {
  const [id, letter, reward] = sample(no, index);
  const status = { s: "succeeded", f: "failed", q: "queued", l: "leased" }[letter];
  const ended = letter === "s" || letter === "f" ? now() - noise(no, index) * 3000 : null;
  return {
    id, task_id: group(no).task_id, sample: index, status, stage: "run", reason: letter === "f" ? "RunTimeout" : "", reward,
    since: now() - 20, ended_at: ended, seconds: 3 + 40 * noise(no, index, 9), tokens: Math.round(3000 * noise(no, index, 4)),
    attempts: letter === "f" ? 2 : 0, worker: "worker-run-0", node: "node-a", policy_version: `v${no % 7}`,
  };
}

function spans(no, index) {
  const start = now() - 3600 + (no * 7 + index) * 0.2;
  const length = noise(no, index, 5) > 0.97 ? 90 : 8 + 12 * noise(no, index, 6);
  return [
    ["init-queue", start, start + 2], ["init", start + 2, start + 4], ["run-queue", start + 4, start + 7],
    ["run", start + 7, start + 7 + length], ["eval-queue", start + 7 + length, start + 8 + length], ["eval", start + 8 + length, start + 11 + length],
  ];
}

function paged(query, total, most, item) {
  const start = Number(query.get("continue") ?? 0);
  const limit = Math.min(most, Number(query.get("limit") ?? 100));
  const end = Math.min(total, start + limit);
  return { items: Array.from({ length: end - start }, (_, index) => item(start + index)), metadata: { continue: end < total ? String(end) : "" } };
}

const WORDS = ["The", " answer", " is", " 4", "2", ".\n", " def", " f", "(x", "):\n", "    return", " x", " +", " 1", "\n\n", "é", "漢字", "\u202e", "\u001b[31m", " because"];

function tokens(query) {
  const start = Number(query.get("start"));
  const total = Number(process.env.FAKE_TOKENS ?? 100_000);
  const n = Math.max(0, Math.min(Number(query.get("limit")), total - start));
  const prompt = 2_000;
  const ids = Array.from({ length: n }, (_, i) => (start + i) % 5 ? 1000 + ((start + i) % 900) : 7);
  const sampled = (i) => start + i >= prompt && (start + i) % 300 < 220;
  const mask = [];
  const versions = [];
  const bytes = Buffer.alloc(n);
  const push = (runs, value) => (runs.at(-1)?.[0] === value ? (runs.at(-1)[1] += 1) : runs.push([value, 1]));
  for (let i = 0; i < n; i += 1) {
    push(mask, sampled(i) ? 1 : 0);
    push(versions, sampled(i) ? (start + i < 50_000 ? "v12" : "v13") : "");
    bytes[i] = sampled(i) ? 1 + Math.floor(254 * noise(start + i) ** 6) : 0;
  }
  const texts = Array.from({ length: n }, (_, i) => WORDS[Math.floor(noise(start + i, 8) * WORDS.length)]);
  return {
    segment: 0, start, total, prompt, ids, texts, mask, versions,
    logprobs: query.get("exact") ? Array.from(bytes, (v) => (v ? -(v - 1) / 20 - 0.00123 : 0)) : bytes.toString("base64"),
  };
}

const TEXTS = [
  ["system", "You are a careful agent. Use the tools."],
  ["user", "Repair the function so that all tests pass.\n\n<script>alert('markup')</script> stays text."],
  ["assistant", "I look at the file first.\u202e reversed \u001b[31mred\u001b[0m zero\u200bwidth"],
  ["tool", "def add(a, b):\n    return a - b\n".repeat(400)],
  ["assistant", "The operator is wrong. I replace it."],
  ["tool", "2 passed in 0.31s"],
];

function messages(query) {
  const total = 60;
  const start = Number(query.get("start"));
  const most = Number(query.get("most"));
  return {
    start, total,
    items: Array.from({ length: Math.max(0, Math.min(total - start, Number(query.get("limit")))) }, (_, i) => {
      const [role, content] = TEXTS[(start + i) % TEXTS.length];
      const calls = role === "assistant" ? [{ name: "shell", arguments: '{"command": "pytest -q"}' }] : [];
      return { role, content: content.slice(0, most), characters: content.length, cut: content.length > most, tool_calls: calls, turn: role === "assistant" ? 0 : null };
    }),
  };
}

function brief(id) {
  const [, no, index] = id.split("-").map(Number);
  const row = rollout(no, index);
  const timing = (queued_seconds, active_seconds) => ({ queued_seconds, active_seconds, attempts: 1 });
  const neighbour = (by) => (index + by >= 0 && index + by < SAMPLES ? `r-${no}-${index + by}` : null);
  return {
    id, job: "repair-bugs", namespace: "default", task_id: row.task_id, sample_index: index, status: row.status === "failed" ? "failed" : "succeeded",
    reason: row.reason, message: row.reason ? "The Run stage took longer than 600 seconds." : "", reward: row.reward,
    reward_components: { tests: row.reward ?? 0, length_penalty: -0.05 }, reward_reason: "", sampling: { temperature: 1, top_p: 1, max_tokens: 1024, seed: 7 },
    timings: { init: timing(2, 2), run: timing(3, 14), eval: timing(1, 3), model_seconds: 9.1, tool_seconds: 3.2, own_seconds: 0.4 },
    attempts: [{ stage: "run", attempt: 1, reason: "BackendUnavailable", message: "connection refused", worker: "worker-run-0", node: "node-a", started: now() - 900, seconds: 2.5, counted: true }],
    attempts_dropped: 0, turns: [{ segment: 0, start: 0, end: 220, finish_reason: "tool_calls", tool_calls: [{ name: "shell", seconds: 1.2 }], model_seconds: 4, tool_seconds: 1.2 }],
    backend: "http://127.0.0.1:9000", truncated: false, truncated_reason: "", template_breaks: 0, metadata: { policy_version: "v12", stdout: "2 passed in 0.31s\n" },
    spans: spans(no, index), segments: [{ prompt: 2000, response: 98_000 }], messages: 60,
    neighbours: { sample_before: neighbour(-1), sample_after: neighbour(1), failed_before: null, failed_after: "r-3-2" }, trace_id: null,
  };
}

function overview() {
  const rate = (scale, seed) => Array.from({ length: 90 }, (_, i) => Math.round(scale * (0.6 + 0.4 * noise(i, seed))));
  const backend = (port, ready) => ({
    url: `http://10.0.0.${port}:8000`, ready, circuit: ready ? "closed" : "open", weights: "Current", policy_version: ready ? "v13" : "v12", active: ready ? 48 : 0,
    max_active: 64, speed: ready ? 2140 : null, kv_hits: ready ? 0.83 : null, message: ready ? "" : "connection refused",
  });
  return {
    time: now(), phases: { Pending: 1, Init: 0, Run: 2, Eval: 0, Succeeded: 1, Failed: 0, Cancelled: 0 },
    queues: { init: { queued: 40, active: 8, slots: 16 }, run: { queued: 180, active: 126, slots: 128 }, eval: { queued: 3, active: 5, slots: 16 } },
    rates: { bucket_seconds: 10, start: now() - 900, rollouts: rate(60, 1), tokens: rate(90_000, 2) },
    pools: [{ namespace: "default", name: "tiny-pool", model: "/models/tiny-policy", phase: "Ready", policy_version: "v13", paused: false, backends: [backend(5, true), backend(6, false)] }],
    nodes: [{ name: "node-a", heard_at: now() - 2, workers: 3, active: 70 }, { name: "node-b", heard_at: now() - 95, workers: 1, active: 4 }],
    workers: ["init", "run", "eval"].map((stage, i) => ({
      name: `worker-${stage}-0`, node: i === 2 ? "node-b" : "node-a", namespace: "default", job: "repair-bugs", stages: [stage], active: 12, heard_at: now() - (i === 2 ? 95 : 1),
      last_error: i === 1 ? { time: now() - 70, reason: "RunTimeout", message: "The Run stage took longer than 600 seconds.", rollout: "r-3-2" } : null,
    })),
  };
}

function statistics() {
  const bins = Array.from({ length: 20 }, (_, i) => Math.round(4000 * noise(i, 11) * (i === 0 ? 3 : 1)));
  return {
    upto: 99_000, rewards: { bins, min: 0, max: 1, n: 98_000, mean: 0.43, zeros: 12_000, ones: 3000 },
    by_version: Array.from({ length: 14 }, (_, i) => ({ version: `v${i}`, index: i, n: 7000, mean: 0.2 + i * 0.02 + 0.03 * noise(i) })),
    by_time: Array.from({ length: 60 }, (_, i) => ({ start: now() - 3600 + i * 60, n: 100, mean: 0.2 + i * 0.005 + 0.05 * noise(i), tokens: 10_000 })),
    failures: [{ reason: "RunTimeout", n: 312, stage: "run", example: "r-3-2" }, { reason: "SandboxStartFailed", n: 12, stage: "init", example: "r-3-2" }],
    truncated: [{ reason: "MaxContext", n: 220 }], stages: { init: { queued: 9000, active: 21_000, n: 99_000 }, run: { queued: 120_000, active: 990_000, n: 99_000 }, eval: { queued: 3000, active: 80_000, n: 99_000 } },
    model_seconds: 610_000, tool_seconds: 320_000, own_seconds: 41_000, tokens: 148_000_000,
  };
}

/** Return the answer to a call, or undefined where there is none. */
export function answer(path, query) {
  const parts = path.split("/").filter(Boolean).map(decodeURIComponent);
  if (path === "/session") return { role: "admin", expires_at: now() + 3600, cancel: true };
  if (path === "/overview") return overview();
  if (path === "/jobs") return { items: JOBS().filter((item) => item.name.includes(query.get("search") ?? "")), metadata: {} };
  if (parts[0] === "workers") return { items: [0, 1, 2].map((i) => ({ ...rollout(TASKS - 1, i), namespace: "default", job: "repair-bugs" })), metadata: {} };
  if (parts[0] !== "rolloutjobs") return undefined;
  if (parts.length === 2) {
    const row = JOBS().find((item) => item.name === parts[1]);
    if (!row) return undefined;
    const message = "60 of 64 rollouts were truncated by maxTokens (1,024): raise sampling.maxTokens";
    const advice = [{ reason: "TruncatedByMaxTokens", message }];
    const conditions = [{ type: "Progressing", status: "True", reason: "RolloutsRunning", message: "64 rollouts are at work." }];
    return { metadata: { name: row.name, namespace: "default" }, spec: { handler: "swe", samplesPerTask: SAMPLES }, status: { phase: row.phase, conditions, advice } };
  }
  if (parts[2] === "statistics") return statistics();
  if (parts[2] === "grid") return { prefix: "", ...paged(query, query.get("search") ? 30 : TASKS, LIMIT, group) };
  if (parts[2] === "gantt") return paged(query, 1500, LIMIT, (i) => ({ ...rollout(i >> 3, i % 8), spans: spans(i >> 3, i % 8) }));
  if (parts[2] !== "rollouts") return undefined;
  if (parts.length === 3) {
    const task = query.get("task");
    if (task) return paged(query, SAMPLES, 200, (i) => rollout(Number(task.split("-").at(-1)), i));
    return paged(query, TASKS * SAMPLES, 200, (i) => rollout(i >> 3, i % 8));
  }
  const kind = parts[4];
  if (kind === "brief") return brief(parts[3]);
  if (kind === "tokens") return tokens(query);
  if (kind === "messages") return parts[5] ? { text: "more text\n".repeat(1000), offset: Number(query.get("offset")), characters: 30_000 } : messages(query);
  if (kind === "difference") {
    const side = (word) => ({ ids: Array.from({ length: 41 }, (_, i) => 1000 + i), texts: Array.from({ length: 41 }, (_, i) => (i < 20 ? WORDS[i % 12] : word)) });
    return { segment: 0, position: 2020, left: side(" yes"), right: side(" no") };
  }
  return brief(parts[3]);
}
