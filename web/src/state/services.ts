/** What every view uses: calls, the clock, the stream of events and the router. */

import { createContext } from "preact";
import { useContext, useEffect, useState } from "preact/hooks";
import type { Calls } from "../api/calls";
import type { ServerClock } from "../api/clock";
import type { Live, LiveEvents } from "../api/live";
import type { Session } from "../api/types";
import type { Location, Router } from "./router";

export interface Services {
  calls: Calls;
  clock: ServerClock;
  live: Live;
  router: Router;
  session: Session | null;
}

export const ServicesContext = createContext<Services | null>(null);

export function useServices(): Services {
  const services = useContext(ServicesContext);
  if (services === null) throw new Error("A view was drawn outside the services' context.");
  return services;
}

/** Return where the reader is, and draw the view again when that changes. */
export function useLocation(): Location {
  const { router } = useServices();
  const [location, set] = useState(router.current);
  useEffect(() => {
    set(router.current);
    return router.listen(() => set(router.current));
  }, [router]);
  return location;
}

/** Return the server's time, and draw the view again every so many seconds. */
export function useNow(seconds: number): number {
  const { clock } = useServices();
  const [now, set] = useState(clock.now());
  useEffect(() => {
    const timer = setInterval(() => {
      if (!document.hidden) set(clock.now());
    }, seconds * 1000);
    return () => clearInterval(timer);
  }, [clock, seconds]);
  return now;
}

/** Listen to an event while the view is drawn. */
export function useLive<K extends keyof LiveEvents>(name: K, listener: (data: LiveEvents[K]) => void, deps: unknown[]): void {
  const { live } = useServices();
  useEffect(() => live.on(name, listener), [live, name, ...deps]);
}
