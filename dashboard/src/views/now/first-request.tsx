import type { Interval, Stats } from "../../api/stats";
import { Card } from "../../components/card";
import { Command } from "../../components/command";

/** What to do while nobody has asked for anything in the last minutes. */
export function FirstRequest({ stats, intervals }: { stats: Stats; intervals: readonly Interval[] }) {
  const idle = stats.queue.held === 0 && intervals.every((interval) => interval.prompt_tokens === 0);
  if (!idle || stats.state !== "serving" || stats.mode === "training_only") {
    return null;
  }
  return (
    <Card title="No requests in the last minutes">
      <p>Any client of OpenAI's API can ask. From a terminal on this machine:</p>
      <Command text={curl(stats.caller.required)} />
    </Card>
  );
}

const BODY = '{"messages": [{"role": "user", "content": "What is the capital of France?"}]}';

const curl = (needsKey: boolean): string =>
  [
    `curl ${location.origin}/v1/chat/completions`,
    ...(needsKey ? ['-H "Authorization: Bearer $MLX_PARALLM_API_KEY"'] : []),
    "-H 'Content-Type: application/json'",
    `-d '${BODY}'`,
  ].join(" \\\n  ");
