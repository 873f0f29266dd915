"use strict";
// Draws the coordinator's status and history. External values are only inserted as text, never as HTML.

const $ = id => document.getElementById(id);
const sleep = ms => new Promise(resolve => setTimeout(resolve, ms));
const css = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const make = (tag, properties, ...children) => {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
};
const CURVES = { loss: "chart-loss", norm: "chart-norm", rate: "chart-rate", step_s: "chart-time" };
// `zoom`: the range of steps that all charts show; null for all steps.
const page = { histories: {}, charts: {}, runs: { runs: [], queued: [] }, stale: true, status: null, present: null, steps: 1, zoom: null };

// The token is in the URL fragment, which no request contains. It is then removed from the address bar.
const fragmentToken = new URLSearchParams(location.hash.slice(1)).get("token");
if (fragmentToken) {
  sessionStorage.setItem("token", fragmentToken);
  history.replaceState(null, "", location.pathname);
}

class Unauthorized extends Error {}

async function ask(path, options = {}) {
  const headers = { Authorization: `Bearer ${sessionStorage.getItem("token") ?? ""}`, ...options.headers };
  const answer = await fetch(path, { ...options, headers });
  if (answer.status === 401) { askForToken(); throw new Unauthorized(); }
  if (!answer.ok) {
    const body = await answer.json().catch(() => ({}));
    throw new Error(body.error ?? `the coordinator answered ${answer.status}`);
  }
  return answer;
}
const read = async path => (await ask(path)).json();
const post = async (path, document_) =>
  (await ask(path, { method: "POST", body: JSON.stringify(document_ ?? {}) })).json();

function askForToken() {
  $("refused").hidden = !sessionStorage.getItem("token");
  $("ask").hidden = false;
  $("shown").hidden = $("picks").hidden = true;
  $("phase").textContent = "";
}
$("ask").addEventListener("submit", event => {
  event.preventDefault();
  sessionStorage.setItem("token", $("token").value.trim());
  $("token").value = "";
  refresh();
});

// Number and time formats.
const formatNumber = value => value == null ? "-" : Number.isInteger(value) ? value.toLocaleString("en") : Number(value.toPrecision(4)).toString();
function duration(seconds) {
  if (seconds == null || !Number.isFinite(seconds)) return "-";
  const whole = Math.max(0, Math.round(seconds)), minutes = Math.floor(whole / 60), hours = Math.floor(minutes / 60);
  if (hours >= 48) return `${Math.floor(hours / 24)} d ${hours % 24} h`;
  if (hours) return `${hours} h ${minutes % 60} min`;
  return minutes ? `${minutes} min ${whole % 60} s` : `${whole} s`;
}
function timeElement(text) {
  const at = new Date(text), today = at.toDateString() === new Date().toDateString();
  return make("time", { dateTime: text, title: text }, today ? at.toLocaleTimeString() : at.toLocaleString());
}

// Fetch a run's history: only the steps that are not known yet.
async function fetchHistory(run) {
  const known = page.histories[run];
  // Journals of older releases have no norm and no rate: ignore empty curves.
  const full = Object.keys(CURVES).flatMap(name => known?.[name].step.length ? [known[name].full] : []);
  const after = full.length ? Math.min(...full) : 0;
  const query = new URLSearchParams({ after });
  if (run) query.set("run", run);
  const update = await read(`history?${query}`);
  const same = known && known.run_id === update.run_id && known.began === update.began
    && Object.keys(CURVES).every(name => known[name].stride === update[name].stride);
  if (known && !same && after > 0) { delete page.histories[run]; return fetchHistory(run); }
  if (same) for (const name of Object.keys(CURVES)) update[name] = appendCurve(known[name], update[name], after);
  return page.histories[run] = update;
}
function appendCurve(old, fresh, after) {
  const knownPoints = old.step.findLastIndex(step => step <= after) + 1;
  const whole = { ...fresh };
  for (const column of ["step", "mean", "low", "high"]) whole[column] = [...old[column].slice(0, knownPoints), ...fresh[column]];
  return whole;
}
function movingAverage(values) {
  let level = null;
  return values.map(value => level = level === null ? value : level + 0.1 * (value - level));
}

// Charts. All show the same range of steps, selected by dragging over a chart or in the list next to the heading.
function chart(id, series, bands, data, { whole = false, zero = false } = {}) {
  const container = $(id), old = page.charts[id];
  container.setAttribute("role", "img");
  container.setAttribute("aria-label", describeCurve(container, data));
  if (!data[0].length) {
    old?.destroy();
    delete page.charts[id];
    if (!container.querySelector(":scope > p")) container.replaceChildren(make("p", {}, "nothing yet"));
    caption(id, series, []);
    return;
  }
  const shape = JSON.stringify([series.map(each => each.label), css("--ink"), container.clientWidth]);
  if (old?.shape === shape) {
    old.setData(data, false);
    old.setScale("x", span());
  } else {
    old?.destroy();
    container.replaceChildren();
    page.charts[id] = createChart(container, id, series, bands, data, whole, zero);
    page.charts[id].shape = shape;
  }
  caption(id, series, data);
}
function describeCurve(container, [steps, values]) {
  const name = container.dataset.name, last = (steps?.length ?? 0) - 1;
  return last < 0 ? `${name}: nothing yet`
    : `${name}: ${formatNumber(values[0])} at step ${steps[0]}, ${formatNumber(values[last])} at step ${steps[last]}`;
}
function createChart(container, id, series, bands, data, whole, zero) {
  const axis = { stroke: css("--soft"), font: "12px system-ui, sans-serif", grid: { stroke: css("--line"), width: 1 }, ticks: { stroke: css("--line"), size: 4 } };
  const up = whole ? { incrs: [1, 2, 5, 10, 20, 50, 100] } : {};
  return new uPlot({
    width: Math.max(200, container.clientWidth), height: 186, bands, legend: { show: false }, padding: [8, 14, 0, 0],
    series: [{ label: "step" }, ...series],
    scales: {
      x: { time: false, range: () => Object.values(span()) },
      y: { range: (_, low, high) => low == null ? [0, 1] : uPlot.rangeNum(zero ? 0 : low, whole ? high + 0.5 : high, 0.1, zero) },
    },
    axes: [{ ...axis, size: 26, incrs: [1, 2, 5].flatMap(one => [1, 10, 100, 1e3, 1e4, 1e5, 1e6, 1e7].map(ten => one * ten)).sort((a, b) => a - b), values: (_, ticks) => ticks.map(tick => tick >= 1e4 ? `${formatNumber(tick / 1e3)}k` : formatNumber(tick)) },
      { ...axis, size: 54, values: (_, ticks) => formatTicks(ticks), ...up }],
    cursor: {
      y: false, drag: { x: true, y: false, setScale: false },
      sync: { key: "steps", filters: { pub: type => ["mousemove", "mouseleave"].includes(type) } },
      bind: { dblclick: () => () => { page.last = 0; zoom(null); } },
    },
    hooks: {
      setCursor: [each => showReading(id, each)],
      setSelect: [each => {
        const { left, width } = each.select;
        page.last = 0;
        if (width >= 4) zoom([each.posToVal(left, "x"), each.posToVal(left + width, "x")].map(Math.round));
      }],
    },
  }, data, container);
}
function span() {
  const [min, max] = page.zoom ?? [0, Math.max(1, page.steps)];
  return { min, max };
}
function formatTicks(ticks) {
  const most = Math.max(...ticks.map(Math.abs));
  return ticks.map(tick => !tick ? "0" : most < 0.01 || most >= 1e5 ? Number(tick.toPrecision(4)).toExponential().replace("e+", "e") : formatNumber(tick));
}
function zoom(steps) {
  page.zoom = steps && steps[1] > steps[0] ? steps : null;
  updateWindowList();
  for (const each of Object.values(page.charts)) {
    each.setScale("x", span());
    each.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
  }
}
function updateWindowList() {
  const known = [100, 1_000, 10_000].filter(many => many < page.steps);
  const dragged = page.zoom && !page.last;
  options($("window"), [["", "all steps"], ...known.map(many => [String(many), `the last ${formatNumber(many)} steps`]),
    ...(dragged ? [["dragged", `steps ${formatNumber(Math.max(0, page.zoom[0]))} to ${formatNumber(page.zoom[1])}`]] : [])],
  dragged ? "dragged" : String(page.last || ""));
}
$("window").addEventListener("change", () => {
  page.last = Number($("window").value) || 0;
  zoom(page.last ? [page.steps - page.last, page.steps] : null);
});
// The caption of a chart: a legend, and the values under the pointer, else the last values.
function caption(id, series, data) {
  const line_ = $(id).parentElement.querySelector("figcaption");
  const keys = series.filter(each => each.key).map(each => make("span", { className: `key ${each.key}` }, each.label));
  line_.querySelectorAll(".key, .reading").forEach(old => old.remove());
  line_.append(...(keys.length > 1 ? keys : []), make("span", { className: "reading" }));
  showReading(id, page.charts[id]);
  if (!data.length) line_.querySelector(".reading").textContent = "";
}
function showReading(id, each) {
  const reading = $(id).parentElement.querySelector(".reading");
  if (!each || !reading) return;
  const at = each.cursor.idx ?? each.data[1].findLastIndex(value => value != null);
  const values = each.series.map((one, n) => one.key ? each.data[n][at] : null).filter(value => value != null);
  const pointed = each.cursor.idx != null && each.cursor.left >= 0;
  reading.textContent = values.length ? `${values.map(formatNumber).join(" · ")}${pointed ? ` at step ${formatNumber(each.data[0][at])}` : ""}` : "";
}
function line(label, key, more = {}) {
  return { label, key, stroke: css(`--${key.split(" ")[0]}`), width: 1.6, points: { show: false }, ...more };
}
const hidden = label => ({ label, stroke: "transparent", points: { show: false } });
const comparisonLine = (run, more = {}) => line(run, "other dashed", { dash: [6, 4], spanGaps: true, ...more });

function drawCurve(id, mine, other, name, { smooth = false, ...more } = {}) {
  const series = [line("raw", "curve", { width: smooth ? 1 : 1.6 }), hidden("low"), hidden("high")];
  let data = [mine.step, mine.mean, mine.low, mine.high];
  if (smooth) { series.push(line("smoothed", "smooth", { width: 2.2 })); data.push(movingAverage(mine.mean)); }
  if (other?.step.length) {
    series.push(comparisonLine(name));
    data = uPlot.join([data, [other.step, smooth ? movingAverage(other.mean) : other.mean]]);
    for (const one of series) one.spanGaps = true;
  }
  chart(id, series, [{ series: [3, 2], fill: `${css("--curve")}38` }], data, more);
}
function drawEvaluations(mine, other, otherName) {
  const names = [...new Set(mine.evaluations.flatMap(each => Object.keys(each.metrics)))].filter(name => !name.startsWith("confusion["));
  $("metric").hidden = !names.length;
  options($("metric"), names.map(name => [name, name]), names.includes($("metric").value) ? $("metric").value : names[0]);
  const name = $("metric").value;
  const column = run => {
    const points = run.evaluations.filter(each => each.metrics[name] != null);
    return [points.map(each => each.step), points.map(each => each.metrics[name])];
  };
  const dots = { points: { show: true, size: 6 } };
  const series = [line(mine.run_id, "curve", dots)];
  let data = column(mine);
  if (other && column(other)[0].length) {
    series.push(comparisonLine(otherName, dots));
    series[0].spanGaps = true;
    data = uPlot.join([data, column(other)]);
  }
  chart("chart-eval", series, [], data);
}
function drawWorkers(mine) {
  const steps = mine.workers_at.map(each => each[0]), counts = mine.workers_at.map(each => each[1]);
  const now = mine.loss.step.at(-1);
  if (steps.length && now > steps.at(-1)) { steps.push(now); counts.push(counts.at(-1)); }
  // Of several changes in one step, keep the last.
  const last = new Map(steps.map((step, at) => [step, counts[at]]));
  chart("chart-workers", [line("workers", "curve", { width: 2, paths: uPlot.paths.stepped({ align: 1 }) })], [],
    [[...last.keys()], [...last.values()]], { whole: true, zero: true });
}
function draw(run, other) {
  const name = other?.run_id ?? "";
  page.steps = Math.max(1, run.loss.step.at(-1) ?? 0, other?.loss.step.at(-1) ?? 0, run.evaluations.at(-1)?.step ?? 0);
  if (page.last) page.zoom = [page.steps - page.last, page.steps];
  updateWindowList();
  drawCurve("chart-loss", run.loss, other?.loss, name, { smooth: true });
  drawEvaluations(run, other, name);
  drawCurve("chart-norm", run.norm, other?.norm, name);
  drawCurve("chart-rate", run.rate, other?.rate, name, { zero: true });
  drawCurve("chart-time", run.step_s, other?.step_s, name, { zero: true });
  drawWorkers(run);
}

// Tables and lists. A row is { cells, kind }; a cell is a text, or a list of texts and elements.
function options(select, pairs, chosen) {
  const wanted = JSON.stringify(pairs);
  if (select.dataset.pairs !== wanted) {
    select.replaceChildren(...pairs.map(([value, text]) => make("option", { value }, text)));
    select.dataset.pairs = wanted;
  }
  if (chosen !== undefined) select.value = chosen;
}
// Roles are explicit: on a narrow screen, CSS displays rows as cards, which removes the implicit roles.
function table(id, heads, rows) {
  const whole = $(id), focus = whole.contains(document.activeElement) ? document.activeElement.ariaLabel : null;
  const body = make("tbody", { role: "rowgroup" }, ...rows.map(({ cells, kind }) => make("tr", { className: kind ?? "", role: "row" },
    ...cells.map((cell, at) => {
      const element = make("td", { role: "cell", className: heads[at] ? "" : "bare" }, ...[cell ?? ""].flat().filter(part => part !== ""));
      element.dataset.of = heads[at];
      return element;
    }))));
  if (!rows.length) body.append(make("tr", { className: "none", role: "row" }, make("td", { role: "cell", colSpan: heads.length }, "none yet")));
  if (body.isEqualNode(whole.tBodies[0])) return;
  whole.role = "table";
  whole.replaceChildren(make("thead", { role: "rowgroup" }, make("tr", { role: "row" },
    ...heads.map(head => make("th", { scope: "col", role: "columnheader" }, head || make("span", { className: "unseen" }, "actions"))))), body);
  if (focus) [...whole.querySelectorAll("button")].find(each => each.ariaLabel === focus)?.focus();
}
function showPairs(id, list) {
  $(id).replaceChildren(...list.map(([name, value, kind]) => make("div", {}, make("dt", {}, name), make("dd", { className: kind ?? "" }, value))));
}
function showLines(list) {
  $("lines").replaceChildren(...list.flatMap(([name, value, kind]) => [make("dt", {}, name), make("dd", { className: kind ?? "" }, value)]));
}
function button(text, label, action) {
  const element = make("button", { type: "button", ariaLabel: label }, text);
  element.addEventListener("click", action);
  return element;
}
const PHASE_CLASSES = { training: "good", evaluating: "good", finished: "good", halted: "bad", failed: "bad" };
const ENDED = ["finished", "drained", "failed"];
const PERMITTED_PHASES = { halt: ["training", "evaluating"], continue: ["halted"], skip: ["halted"], checkpoint: ["training", "evaluating", "halted"] };

function showRun(run, status, other) {
  const live = status.run_id === run.run_id && status.run_id !== undefined;
  const phase = live ? status.phase : run.outcome || (run.run_id ? "not ended" : status.phase);
  const isInProgress = live && !ENDED.includes(phase), steps = run.steps ?? (live || !run.run_id ? status.steps : null);
  const step = live ? status.step : run.loss.step.at(-1) ?? 0;
  $("h-run").textContent = run.run_id;
  showPhase(phase, live || !run.run_id ? status.reason ?? "" : "");
  $("progress").value = steps ? step / steps : 0;
  const epochs = run.epochs && steps ? `, ${formatNumber(run.epochs * step / steps)} of ${formatNumber(run.epochs)} epochs` : "";
  $("count").textContent = `step ${formatNumber(step)} of ${formatNumber(steps)}${steps ? `, ${Math.floor(100 * step / steps)} %` : ""}${epochs}`;
  document.title = `${isInProgress ? `${formatNumber(step)}/${formatNumber(steps)} ` : ""}${run.run_id} ${phase}`;
  for (const each of document.querySelectorAll("[data-act]")) {
    const phases = PERMITTED_PHASES[each.dataset.act];
    each.disabled = !isInProgress || (phases && !phases.includes(status.phase));
    each.classList.toggle("wanted", each.dataset.act === "continue");
  }
  draw(run, other);
  const recent = run.step_s.mean.slice(-20), each = recent.reduce((sum, one) => sum + one, 0) / recent.length;
  const since = run.began ? (Date.parse(run.last) - Date.parse(run.began)) / 1000 : null;
  const hasPace = isInProgress && status.elapsed_s !== undefined;
  const name = $("metric").value, metricValue = run.evaluations.at(-1)?.metrics[name];
  const unlike = live ? describeMixedProfiles(status, run) : "";
  showPairs("facts", [
    ["loss", formatNumber(live ? status.loss : run.loss.mean.at(-1))],
    [`held out${name ? `: ${name}` : ""}`, formatNumber(metricValue)],
    ["gradient norm", formatNumber(run.norm.mean.at(-1))], ["learning rate", formatNumber(run.rate.mean.at(-1))],
    ["bits", !live || status.exact === null ? "-" : status.exact ? "exact" : "mixed", live && status.exact === false ? "warn" : ""],
    ["samples per second", formatNumber(hasPace ? status.samples_per_s : run.samples && each ? run.samples / each : null)],
    ["seconds per step", formatNumber(Number.isFinite(each) ? each : null)],
    ["elapsed", duration(hasPace ? status.elapsed_s : since)],
    ["time left", hasPace && PERMITTED_PHASES.halt.includes(phase) ? duration(status.left_s) : "-"],
    ["workers", live ? `${status.able_workers} of ${status.expect_workers}` : formatNumber(run.workers_at.at(-1)?.[1])],
  ]);
  showLines([
    ...(isInProgress ? [["waits for", phase === "halted" ? "an operator: continue, or skip this step" : status.waiting_for ? status.waiting_for + (status.stage ? ` (${status.stage})` : "") : "nothing"]] : []),
    ...(isInProgress && status.exchange?.reason ? [["exchange", status.exchange.reason]] : []),
    ...(unlike ? [["differing workers", unlike, "warn"]] : []),
    ...(live && status.weights_digest ? [[status.result ? "weights digest" : "weights digest of the checkpoint", status.weights_digest, "mono"]] : []),
    ...(live && status.checkpoint != null ? [["checkpoint", `after step ${formatNumber(status.checkpoint)}, in ${status.directory}`]] : []),
  ]);
  showWorkers(run, live || !run.run_id ? status : null);
  showEvents(run.events);
}
function showPhase(phase, reason) {
  const kind = PHASE_CLASSES[phase] ?? "warn";
  $("phase").textContent = phase;
  $("phase").className = `pill ${kind}`;
  $("reason").textContent = reason;
  $("reason").className = kind === "bad" ? "bad" : "soft";
}
// In a mixed run, name the workers whose numerics profile is not the most common one.
function describeMixedProfiles(status, run) {
  if (status.exact !== false) return "";
  const byProfile = Map.groupBy(status.workers.filter(each => each.signature), each => each.signature);
  const groups = [...byProfile.values()].sort((one, two) => two.length - one.length);
  const names = group => group.map(each => each.name).join(", ");
  if (groups.length > 1) return groups.slice(1).map(group => `${names(group)} (${group[0].signature_text})`).join("; ")
    + `, from ${names(groups[0])} (${groups[0][0].signature_text})`;
  const absent = run.workers.filter(each => each.signature && !byProfile.has(each.signature));
  return absent.length ? `${names(absent)}, disconnected` : "a worker that started from another state";
}
function linksOf(worker) {
  return Object.entries(worker.links ?? {}).map(([peer, link]) =>
    `${peer}: ${link.mbit} Mbit/s, ${formatNumber(link.bytes_sent / 1e6)} MB out, ${formatNumber(link.bytes_received / 1e6)} MB in`).join("\n");
}
function showWorkers(run, status) {
  const connected = status?.workers ?? [], all = connected.reduce((sum, each) => sum + (each.microbatches_of_step ?? 0), 0);
  const error = name => {
    const last = run.errors[name];
    return last ? [last.text, make("small", {}, `${last.what.replaceAll("_", " ")}, step ${formatNumber(last.step)}`)] : "";
  };
  const most = [...Map.groupBy(connected.filter(each => each.signature && each.duty === "train"), each => each.signature).values()].sort((a, b) => b.length - a.length)[0]?.[0].signature;
  const present = connected.map(worker => {
    const share = worker.microbatches_of_step, waited = worker.waited_for ? make("small", { className: "warn" }, "waited for")
      : worker.state === "active" && all && status.waiting_for ? make("small", {}, "has finished its share") : "";
    const at = worker.inner_phase, part = make("progress", at ? { max: at.inner_steps, value: at.inner_step, ariaLabel: `replica ${at.replica}` }
      : { max: all || 1, value: share ?? 0, ariaLabel: `share of ${worker.name}` });
    const unlike = worker.signature && worker.duty === "train" && worker.signature !== most;
    return { cells: [
      [worker.name, make("small", { title: linksOf(worker) }, worker.duty === "train" ? worker.address : `${worker.address}, duty: ${worker.duty}`)],
      [worker.cannot ? make("span", { className: "bad" }, "cannot take part") : worker.aside_until ? `aside until step ${formatNumber(worker.aside_until)}` : worker.late ? `${worker.state}, late` : worker.state, waited],
      [worker.device || "-", make("small", {}, worker.backend)],
      !all || share === undefined ? "" : at ? [`replica ${at.replica}: step ${at.inner_step} of ${at.inner_steps}`, part]
        : status.replicas && !share ? "standing by" : [`${share} of ${all}`, part],
      worker.ms_per_microbatch == null ? "" : `${formatNumber(worker.ms_per_microbatch)} ms`,
      worker.last_seen_s < 5 ? "just now" : `${duration(worker.last_seen_s)} ago`,
      worker.signature ? [make("span", { className: unlike ? "mono warn" : "mono", title: worker.signature_text ?? "" }, worker.signature), unlike ? make("small", { className: "warn" }, "differs from the others") : ""] : "",
      worker.cannot || error(worker.name), revokeButton(worker.name),
    ] };
  });
  const names = new Set(connected.map(worker => worker.name));
  const absent = run.workers.filter(worker => !names.has(worker.name)).map(worker => ({
    cells: [worker.name, [worker.here ? "connected at the end" : "gone", make("small", {}, worker.why)],
      [worker.device || "-", make("small", {}, worker.backend)], "", "", worker.here ? "" : timeElement(worker.since),
      make("span", { className: "mono" }, worker.signature), error(worker.name), ""],
    kind: "gone",
  }));
  table("workers", ["worker", "state", "device", "share of this step", status?.replicas ? "per replica" : "per microbatch", "last seen", "numerics", "last error", ""], [...present, ...absent]);
}
function revokeButton(name) {
  return button("Revoke", `Revoke ${name}`, () => act(`Revoke ${name}? It is disconnected; its key and the join token become invalid.`,
    "Revoke", () => post("revoke", { name })));
}
function showEvents(events) {
  table("events", ["time", "step", "what", "worker", "why"], [...events].reverse().map(event => ({
    cells: [timeElement(event.time), formatNumber(event.step), event.what.replaceAll("_", " "), event.worker, event.text],
    kind: ["halted", "failed"].includes(event.what) ? "alarm" : "",
  })));
}
function showRuns(status) {
  const { runs, queued } = page.runs;
  const look = (id, run) => { $(id).value = run; $(id).dispatchEvent(new Event("change")); scrollTo({ top: 0 }); };
  table("runs", ["run", "task", "state", "steps", "loss", "held-out metrics", "last update", ""], [
    ...queued.map((run, at) => ({ cells: [run, "", `queued, ${at + 1} of ${queued.length}`, "", "", "", "", ""] })),
    ...runs.map(run => {
      const present = run.run_id === status.run_id, isInProgress = present && !ENDED.includes(status.phase), here = run.run_id === $("run").value;
      return { cells: [run.run_id, run.task, present ? status.phase : run.outcome || "not ended",
        `${formatNumber(present ? status.step : run.step)} of ${formatNumber(run.steps ?? (present ? status.steps : run.step))}`, formatNumber(present ? status.loss : run.loss),
        Object.entries(isInProgress ? status.eval ?? {} : run.eval).filter(([name]) => !name.startsWith("confusion[")).slice(0, 3)
          .map(([name, value]) => `${name} ${formatNumber(value)}`).join(", "), isInProgress ? "now" : timeElement(run.changed),
        [...(here ? ["shown"] : [button("Show", `Show ${run.run_id}`, () => look("run", run.run_id)), " ",
          button("Beside", `Show ${run.run_id} beside`, () => look("beside", run.run_id))]),
          ...(isInProgress || run.outcome === "finished" || queued.includes(run.run_id) ? [] : [" ", button("Resume", `Resume ${run.run_id}`,
            () => act(`Resume ${run.run_id}? It continues when the runs before it have ended.`, "Resume", () => post("resume", { run_id: run.run_id })))])]] };
    }),
  ]);
}

// Actions: each does what the command of the same name does, after a confirmation.
async function act(question, word, action) {
  $("question").textContent = question;
  $("yes").textContent = word;
  $("confirm").returnValue = "no";
  $("confirm").showModal();
  await new Promise(resolve => $("confirm").addEventListener("close", resolve, { once: true }));
  if ($("confirm").returnValue !== "yes") return;
  try {
    await action();
    page.stale = true;
    $("acted").textContent = `${word}: done.`;
  } catch (error) { $("acted").textContent = `${word}: ${error.message}`; }
  scheduleRefresh();
}
const ACTS = {
  halt: ["Halt the run during its step?", "Halt", () => post("halt")],
  continue: ["Continue the halted run?", "Continue", () => post("continue", { skip_step: false })],
  skip: ["Skip this step? Its samples count as used, and no update is applied.", "Skip the step", () => post("continue", { skip_step: true })],
  checkpoint: ["Save a checkpoint of the current state?", "Checkpoint", () => post("checkpoint")],
  "give-up": ["Give up the run? It ends as failed, the next run begins, and this run can be resumed.", "Give up", () => post("give-up")],
  drain: ["Drain? The run ends after the step in progress; it can be resumed.", "Drain", () => post("drain")],
};
for (const button of document.querySelectorAll("[data-act]")) button.addEventListener("click", () => act(...ACTS[button.dataset.act]));

$("join").addEventListener("click", async () => {
  const { lines } = await read("join");
  const line_ = (lines.find(each => each.includes("SAMESTEP_TOKEN")) ?? lines[0]).replace("listening for workers:", "").trim();
  try {
    await navigator.clipboard.writeText(line_);
    $("joined").textContent = "Copied. It holds the join token: paste it only on trusted machines.";
  } catch { $("joined").textContent = line_; }
});
$("report").addEventListener("click", async () => {
  // Open the tab within the click handler, since browsers block later ones; fill it when the report arrives.
  const tab = open("about:blank"), run = $("run").value;
  try {
    const report = await (await ask(`report${run ? `?${new URLSearchParams({ run })}` : ""}`)).blob();
    const address = URL.createObjectURL(report);
    if (tab) tab.location = address;
    else make("a", { href: address, download: `${run || "run"}-report.html` }).click();
    $("acted").textContent = tab ? "The report is in a new tab." : "The report is saved.";
  } catch (error) { tab?.close(); $("acted").textContent = error.message; }
});

let checking = 0;
$("spec").addEventListener("input", async () => {
  const mine = ++checking;
  $("submit").disabled = true;
  await sleep(300);
  if (mine !== checking) return;
  try {
    const { run, steps } = await (await ask("check", { method: "POST", body: $("spec").value })).json();
    if (mine !== checking) return;
    $("verdict").textContent = `${run.task}, ${steps ?? "all"} steps: can be submitted.`;
    $("submit").disabled = false;
    $("submit").onclick = () => act(`Submit ${run.name}: ${run.task}, ${steps ?? "all"} steps?`, "Submit", () => post("submit", { run }));
  } catch (error) { if (mine === checking) $("verdict").textContent = error.message; }
});

// Refresh.
async function refresh() {
  try {
    const status = await read("status");
    if (page.stale) { page.stale = false; page.runs = await read("runs"); }
    page.status = status;
    $("ask").hidden = $("lost").hidden = true;
    $("shown").hidden = $("picks").hidden = false;
    if (!$("ask").contains(document.activeElement)) $("refused").hidden = true;
    const known = [...new Set([status.run_id, ...page.runs.runs.map(each => each.run_id)].filter(Boolean))];
    const chosen = $("run").value;
    // If the current run is selected, follow to the next one when it starts.
    const wanted = chosen && chosen !== page.present && known.includes(chosen) ? chosen : status.run_id ?? known[0] ?? "";
    page.present = status.run_id ?? "";
    options($("run"), known.length ? known.map(run => [run, run]) : [["", "no run yet"]], wanted);
    const others = known.filter(run => run !== wanted);
    options($("beside"), [["", "no other"], ...others.map(run => [run, run])], others.includes($("beside").value) ? $("beside").value : "");
    showRuns(status);
    if (!wanted) return empty(status);
    const run = await fetchHistory(wanted);
    const otherRun = $("beside").value ? await fetchHistory($("beside").value) : null;
    showRun(run, status, otherRun);
  } catch (error) {
    if (error instanceof Unauthorized) return;
    $("lost").hidden = !(error instanceof TypeError);
    if (!(error instanceof TypeError)) $("acted").textContent = error.message;
  }
}
function empty(status) {
  $("h-run").textContent = "No run yet";
  $("count").textContent = "";
  showPhase(status.phase, status.reason);
  showPairs("facts", [["workers", `${status.able_workers} of ${status.expect_workers}`], ["address", status.address], ["encryption", status.encryption]]);
  showLines([]);
  for (const id of [...Object.values(CURVES), "chart-eval", "chart-workers"]) chart(id, [], [], [[]]);
  showWorkers({ workers: [], errors: {} }, status);
  for (const each of document.querySelectorAll("[data-act]")) each.disabled = each.dataset.act !== "drain";
  showEvents([]);
}
let due = false, refreshing = Promise.resolve();
function scheduleRefresh() {
  if (due || document.hidden) return;
  due = true;
  setTimeout(() => { due = false; refreshing = refreshing.then(refresh); }, 700);
}
document.addEventListener("visibilitychange", scheduleRefresh);
for (const id of ["run", "beside", "metric"]) $(id).addEventListener("change", () => {
  page.present = null;
  if (id === "run") { page.zoom = null; page.last = 0; }
  refreshing = refreshing.then(refresh);
});
let sized = 0;
addEventListener("resize", () => { clearTimeout(sized); sized = setTimeout(scheduleRefresh, 100); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", scheduleRefresh);

// Read the event stream with fetch: EventSource cannot send the token.
async function listen() {
  let last = "", pause = 500;
  for (;;) {
    try {
      const answer = await ask("events", { headers: last ? { "Last-Event-ID": last } : {} });
      pause = 500;
      page.stale = true;
      scheduleRefresh();
      const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
      for (let rest = ""; ;) {
        const { value, done } = await reader.read();
        if (done) break;
        const lines = (rest + value).split("\n");
        rest = lines.pop();
        for (const one of lines) {
          if (one.startsWith("id: ")) last = one.slice(4);
          if (one.includes('"event": "run_')) page.stale = true;
        }
        scheduleRefresh();
      }
    } catch (error) { if (!(error instanceof Unauthorized)) $("lost").hidden = false; }
    while (!$("ask").hidden) await sleep(200);
    await sleep(pause = Math.min(pause * 2, 5000));
  }
}
setInterval(() => { if ($("ask").hidden) scheduleRefresh(); }, 5000);
setInterval(() => { page.stale = true; }, 30_000);
refresh().then(listen);
