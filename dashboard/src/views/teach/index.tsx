/** The first hour: three prompts, a rule for the reward, and a model that gets better at them while you look. */

import { useState } from "preact/hooks";
import "../../style/teach.css";
import type { NewLesson } from "../../api/lessons";
import { may } from "../../components/action";
import { NoRole } from "../../components/with-training";
import { now } from "../../live/stats";
import { Course } from "./course";
import { EMPTY, EXAMPLES } from "./examples";
import { NewLessonForm } from "./form";
import { Obstacle } from "./obstacle";
import { useLesson } from "./use-lesson";

export function TeachView() {
  if (now.value === null) {
    return <p class="empty">Asking the server…</p>;
  }
  return may("train") ? <Lessons /> : <NoRole subject="Lessons are" />;
}

function Lessons() {
  const { status, refused, refresh } = useLesson();
  const [again, setAgain] = useState<NewLesson | "new" | null>(null);
  if (refused !== null) {
    return <p class="empty">{refused.message}</p>;
  }
  if (status === null) {
    return <p class="empty">Asking the server…</p>;
  }
  const { lesson, obstacle } = status;
  if (lesson !== null && (lesson.state !== "ended" || again === null)) {
    return <Course lesson={lesson} refresh={refresh} onNew={setAgain} canStart={obstacle === ""} />;
  }
  if (obstacle) {
    return <Obstacle reason={obstacle} />;
  }
  const begun = async () => {
    await refresh();
    setAgain(null);
  };
  return <NewLessonForm from={again === "new" ? EMPTY : (again ?? EXAMPLES[0].lesson)} onBegun={begun} />;
}
