/** The rows of the grid as events change them. Everything is pure. */

import type { GridRow, GridSample } from "../../api/types";

/**
 * Put rollouts that have ended into their cells, and say what follows for their groups. Whether a group has a
 * signal only the control plane says. Other rows stay the same objects, so they are not drawn again.
 */
export function withEnded(rows: GridRow[], ended: readonly { id: string; task_id: string; status: string; reward: number | null }[]): GridRow[] {
  const byId = new Map(ended.map((rollout) => [rollout.id, rollout]));
  const tasks = new Set(ended.map((rollout) => rollout.task_id));
  return rows.map((row) => {
    if (!tasks.has(row.task_id)) return row;
    const samples = row.samples.map((sample): GridSample => {
      const rollout = byId.get(sample[0]);
      return rollout ? [sample[0], rollout.status.charAt(0), rollout.reward] : sample;
    });
    const rewards = samples.map(([, , reward]) => reward).filter((reward): reward is number => reward !== null);
    const all = samples.every(([, letter]) => letter !== "q" && letter !== "l");
    return {
      ...row,
      samples,
      mean: rewards.length > 0 ? rewards.reduce((sum, reward) => sum + reward, 0) / rewards.length : null,
      state: all ? "ended" : "active",
    };
  });
}
