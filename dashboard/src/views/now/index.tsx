/** What the server does at this moment: speed, queue, memory, and how the device spends its time. */

import { history, now } from "../../live/stats";
import { Device } from "./device";
import { FirstRequest } from "./first-request";
import { Headline } from "./headline";
import { Load } from "./load";
import { Memory } from "./memory";
import { Models } from "./models";
import { Pause } from "./pause";
import { Sequences, Speed } from "./speed";
import { Training } from "./training";
import "../../style/learning.css";

export function NowView() {
  const stats = now.value;
  if (stats === null) {
    return <p class="empty">Asking the server…</p>;
  }
  const intervals = history.value;
  return (
    <>
      <Headline stats={stats} intervals={intervals} />
      <div class="controls">
        <Pause state={stats.state} />
      </div>
      <FirstRequest stats={stats} intervals={intervals} />
      <div class="cards">
        <Speed intervals={intervals} />
        <Device intervals={intervals} trains={stats.training !== null} />
        <Memory memory={stats.memory} trains={stats.training !== null} />
        <Sequences intervals={intervals} />
        <Load load={stats.load} />
        {stats.training && <Training training={stats.training} />}
        {stats.models.length > 1 && <Models models={stats.models} />}
      </div>
    </>
  );
}
