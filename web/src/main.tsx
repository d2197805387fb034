/** The beginning of the page: it signs in, makes the services, and draws the view that the address names. */

import { render } from "preact";
import { App } from "./App";
import { cleanPrefix } from "./state/place";
import "./styles/base.css";
import "./styles/parts.css";
import "./styles/views.css";
import "./styles/trajectory.css";
import { applyTheme, savedTheme } from "./state/theme";

applyTheme(savedTheme());
const prefix = cleanPrefix(document.querySelector<HTMLMetaElement>("meta[name=rollyard-prefix]")?.content ?? "");
const root = document.getElementById("page");
if (root) render(<App prefix={prefix} />, root);
