import { Command } from "../../components/command";
import { now } from "../../live/stats";

/** What to do to see groups. */
export const NothingCollected = ({ filtered }: { filtered: boolean }) =>
  filtered ? (
    <p class="empty">No group is like that. “Show all” above takes the choices back.</p>
  ) : (
    <>
      <p class="empty">
        {now.value?.caller.role === "admin"
          ? "Nothing was collected since the server started."
          : "Nothing that your key may see was collected since the server started: a key sees its own answers, and those " +
            "that the server draws by itself."}{" "}
        Answers are collected from requests that are marked with collect_trajectory, from lessons (the view Teach), and
        from an environment.
      </p>
      <Command text={curl()} />
    </>
  );

const BODY = {
  prompt: "The film was dull. Positive or negative?",
  n: 4,
  max_tokens: 12,
  collect_trajectory: true,
};

const curl = (): string =>
  [
    `curl ${location.origin}/v1/completions`,
    ...(now.value?.caller.required ? ['-H "Authorization: Bearer $MLX_PARALLM_API_KEY"'] : []),
    "-H 'Content-Type: application/json'",
    `-d '${JSON.stringify(BODY)}'`,
  ].join(" \\\n  ");
