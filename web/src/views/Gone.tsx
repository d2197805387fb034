/** What stands in the place of a job that does not exist, or no longer. */

import type { ComponentChildren, JSX } from "preact";
import { useState } from "preact/hooks";
import { Empty } from "../parts/feedback";
import { Link } from "../parts/Link";
import { useLive, useServices } from "../state/services";
import { visibleLine } from "../text/visible";

export function Gone({ namespace, name, deleted }: { namespace: string; name: string; deleted: boolean }): JSX.Element {
  const { router } = useServices();
  return (
    <Empty title={deleted ? "This job was deleted." : "There is no such job."}>
      <p>
        {deleted ? "Its rollouts are gone with it: " : "It may have been deleted, or the link may be wrong: "}
        <code>
          {visibleLine(namespace)}/{visibleLine(name)}
        </code>
      </p>
      <Link href={router.href({ view: "overview" })}>Go to the overview</Link>
    </Empty>
  );
}

/** Show a view of a job until the stream says that the job was deleted. */
export function WhileThere({ namespace, name, children }: { namespace: string; name: string; children: ComponentChildren }): JSX.Element {
  const [gone, setGone] = useState(false);
  useLive("gone", (which) => {
    if (which.name === name && which.namespace === namespace) setGone(true);
  }, [namespace, name]);
  return gone ? <Gone namespace={namespace} name={name} deleted={true} /> : <>{children}</>;
}
