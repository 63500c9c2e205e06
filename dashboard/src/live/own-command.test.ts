import { expect, test } from "vitest";
import { added } from "./own-command";

test("flags are added to the server's own command, unless it has them", () => {
  const command = "uv run mlx_parallm_serve --port 8021 --checkpoint-dir=runs/mine";
  expect(added(command, ["--enable-rl-training", "--checkpoint-dir runs/served"])).toBe(
    `${command} --enable-rl-training`,
  );
  expect(added("mlx_parallm serve --run runs/mine", ["--checkpoint-dir runs/served"])).toBe(
    "mlx_parallm serve --run runs/mine",
  );
  expect(added("mlx_parallm_serve", ["--environment words"])).toBe("mlx_parallm_serve --environment words");
});
