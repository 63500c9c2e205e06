import { useCallback, useEffect, useState } from "preact/hooks";
import { ApiError } from "../../api/client";
import { type LessonStatus, lessonStatus } from "../../api/lessons";

const EVERY_MS = 1500;

export interface Shown {
  status: LessonStatus | null;
  /** Why the server does not show its lessons, such as the role of the key. */
  refused: ApiError | null;
  /** Asks at once, after something was changed. */
  refresh: () => Promise<void>;
}

/** The lesson of the server, asked for again and again. While the server does not answer, the last one stays. */
export function useLesson(): Shown {
  const [status, setStatus] = useState<LessonStatus | null>(null);
  const [refused, setRefused] = useState<ApiError | null>(null);
  const refresh = useCallback(async () => {
    try {
      setStatus(await lessonStatus());
      setRefused(null);
    } catch (error) {
      setRefused(error instanceof ApiError ? error : null);
    }
  }, []);
  useEffect(() => {
    void refresh();
    const timer = setInterval(() => document.hidden || void refresh(), EVERY_MS);
    return () => clearInterval(timer);
  }, [refresh]);
  return { status, refused, refresh };
}
