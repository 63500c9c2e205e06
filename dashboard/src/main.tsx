import { render } from "preact";
import { App } from "./app";
import { watch } from "./live/stats";
import "uplot/dist/uPlot.min.css";
import "./style/base.css";
import "./style/components.css";

watch();
render(<App />, document.getElementById("app") as HTMLElement);
