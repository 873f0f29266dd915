"use strict";
// What the coordinator says, drawn. Texts from outside only ever become text of the page.

const $ = id => document.getElementById(id);
const sleep = ms => new Promise(resolve => setTimeout(resolve, ms));
const css = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
// Okabe and Ito's palette: told apart by those who do not see all colours alike.
const COLOURS = { mine: "#0072b2", smooth: "#d55e00", other: "#009e73" };
const CURVES = { loss: "chart-loss", step_s: "chart-time" };
const shown = { runs: {}, charts: {}, status: null, present: null };

// The token comes in the fragment, which is in no request, and does not stay in the address.
const given = new URLSearchParams(location.hash.slice(1)).get("token");
if (given) {
  sessionStorage.setItem("token", given);
  history.replaceState(null, "", location.pathname);
}

class Refused extends Error {}

async function ask(path, options = {}) {
  const headers = { Authorization: `Bearer ${sessionStorage.getItem("token") ?? ""}`, ...options.headers };
  const answer = await fetch(path, { ...options, headers });
  if (answer.status === 401) { wantToken(); throw new Refused(); }
  if (!answer.ok) {
    const said = await answer.json().catch(() => ({}));
    throw new Error(said.error ?? `the coordinator answered ${answer.status}`);
  }
  return answer;
}
const read = async path => (await ask(path)).json();
const tell = async (path, document_) =>
  (await ask(path, { method: "POST", body: JSON.stringify(document_ ?? {}) })).json();

function wantToken() {
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

// Numbers for eyes.
const figure = value => value == null ? "-" : Number.isInteger(value) ? String(value) : Number(value.toPrecision(4)).toString();
function duration(seconds) {
  if (seconds == null || !Number.isFinite(seconds)) return "-";
  const whole = Math.max(0, Math.round(seconds)), minutes = Math.floor(whole / 60), hours = Math.floor(minutes / 60);
  if (hours) return `${hours} h ${minutes % 60} min`;
  return minutes ? `${minutes} min ${whole % 60} s` : `${whole} s`;
}

// What is known of a run, brought up to date: only what is new comes over.
async function follow(run) {
  const known = shown.runs[run];
  const after = known ? Math.min(...Object.keys(CURVES).map(name => known[name].full)) : 0;
  const query = new URLSearchParams({ after });
  if (run) query.set("run", run);
  const news = await read(`history?${query}`);
  const same = known && known.run_id === news.run_id && known.began === news.began
    && Object.keys(CURVES).every(name => known[name].stride === news[name].stride);
  if (known && !same && after > 0) { delete shown.runs[run]; return follow(run); }
  if (same) for (const name of Object.keys(CURVES)) news[name] = joined(known[name], news[name], after);
  return shown.runs[run] = news;
}
function joined(old, fresh, after) {
  const kept = old.step.findLastIndex(step => step <= after) + 1;
  const whole = { ...fresh };
  for (const column of ["step", "mean", "low", "high"]) whole[column] = [...old[column].slice(0, kept), ...fresh[column]];
  return whole;
}
function smoothed(values) {
  let level = null;
  return values.map(value => level = level === null ? value : level + 0.1 * (value - level));
}

// Charts.
function chart(id, series, bands, data, whole = false) {
  const place = $(id), old = shown.charts[id], name = id.slice(6);
  const [steps, values] = data, last = steps.length - 1;
  place.setAttribute("role", "img");
  place.setAttribute("aria-label", last < 0 ? `${name}: nothing yet`
    : `${name}: ${figure(values[0])} at step ${steps[0]}, ${figure(values[last])} at step ${steps[last]}`);
  if (last < 0) {
    if (old) { old.destroy(); delete shown.charts[id]; }
    place.replaceChildren(Object.assign(document.createElement("p"), { textContent: "nothing yet" }));
    return;
  }
  const shape = JSON.stringify([series.map(each => each.label), css("--ink")]);
  if (old && old.shape === shape) {
    const zoomed = old.scales.x.min > old.data[0][0] || old.scales.x.max < old.data[0].at(-1);
    old.setData(data, !zoomed);
    if (zoomed) old.redraw();
    return;
  }
  if (old) old.destroy();
  place.replaceChildren();
  const axis = { stroke: css("--soft"), grid: { stroke: css("--line"), width: 1 }, ticks: { stroke: css("--line") } };
  const made = new uPlot({
    width: Math.max(200, place.clientWidth), height: 220, series: [{ label: "step" }, ...series], bands,
    scales: { x: { time: false } },
    axes: [{ ...axis }, { ...axis, size: 58, values: (_, ticks) => ticks.map(figure), ...(whole && { incrs: [1, 2, 5, 10, 20, 50] }) }],
    cursor: { drag: { x: true, y: false } },
  }, data, place);
  made.shape = shape;
  shown.charts[id] = made;
}
function line(label, stroke, more = {}) {
  return { label, stroke, width: 1.5, points: { show: false }, value: (_, value) => figure(value), ...more };
}
function drawCurve(id, mine, other, smooth) {
  const series = [line("mean", COLOURS.mine), line("low", "transparent"), line("high", "transparent")];
  let data = [mine.step, mine.mean, mine.low, mine.high];
  if (smooth) { series.push(line("smoothed", COLOURS.smooth, { width: 2 })); data.push(smoothed(mine.mean)); }
  if (other) {
    series.push(line("beside", COLOURS.other, { dash: [6, 4], spanGaps: true }));
    data = uPlot.join([data, [other.step, smooth ? smoothed(other.mean) : other.mean]]);
    for (const one of series) one.spanGaps = true;
  }
  chart(id, series, [{ series: [3, 2], fill: `${COLOURS.mine}33` }], data);
}
function drawEvaluations(mine, other) {
  const names = [...new Set(mine.evaluations.flatMap(each => Object.keys(each.metrics)))];
  options($("metric"), names.map(name => [name, name]), $("metric").value || names[0]);
  const name = $("metric").value;
  const column = run => {
    const points = run.evaluations.filter(each => each.metrics[name] != null);
    return [points.map(each => each.step), points.map(each => each.metrics[name])];
  };
  const series = [line(name, COLOURS.mine, { points: { show: true, size: 6 } })];
  let data = column(mine);
  if (other) {
    series.push(line("beside", COLOURS.other, { dash: [6, 4], spanGaps: true, points: { show: true, size: 6 } }));
    series[0].spanGaps = true;
    data = uPlot.join([data, column(other)]);
  }
  chart("chart-eval", series, [], data);
}
function drawWorkers(mine) {
  const steps = mine.workers_at.map(each => each[0]), counts = mine.workers_at.map(each => each[1]);
  const now = mine.loss.step.at(-1);
  if (steps.length && now > steps.at(-1)) { steps.push(now); counts.push(counts.at(-1)); }
  // Where several changes fall on one step, the last one counts.
  const last = new Map(steps.map((step, at) => [step, counts[at]]));
  chart("chart-workers", [line("workers", COLOURS.mine, { paths: uPlot.paths.stepped({ align: 1 }) })], [],
    [[...last.keys()], [...last.values()]], true);
}

// Tables and facts.
function options(select, pairs, chosen) {
  const wanted = JSON.stringify(pairs);
  if (select.dataset.pairs !== wanted) {
    select.replaceChildren(...pairs.map(([value, text]) => Object.assign(document.createElement("option"), { value, textContent: text })));
    select.dataset.pairs = wanted;
  }
  if (chosen !== undefined) select.value = chosen;
}
function rows(body, list) {
  body.replaceChildren(...list.map(({ cells, kind, button }) => {
    const row = document.createElement("tr");
    if (kind) row.className = kind;
    for (const text of cells) row.insertCell().textContent = text ?? "";
    if (button) row.insertCell().append(button);
    return row;
  }));
}
function facts(pairs) {
  $("facts").replaceChildren(...pairs.map(([name, value, wide]) => {
    const box = document.createElement("div");
    if (wide) box.className = "wide";
    box.append(Object.assign(document.createElement("dt"), { textContent: name }),
      Object.assign(document.createElement("dd"), { textContent: value }));
    return box;
  }));
}
const KINDS = { training: "good", evaluating: "good", finished: "good", halted: "bad", failed: "bad" };

function showRun(run, status, other) {
  const live = status.run_id === run.run_id && status.run_id !== undefined;
  const phase = live ? status.phase : run.outcome || (run.run_id ? "not ended" : status.phase);
  $("phase").textContent = phase;
  $("phase").className = `pill ${KINDS[phase] ?? "warn"}`;
  $("reason").textContent = live || !run.run_id ? status.reason ?? "" : "";
  const step = live ? status.step : run.loss.step.at(-1) ?? 0, steps = run.steps ?? status.steps;
  $("progress").value = steps ? step / steps : 0;
  const recent = run.step_s.mean.slice(-20), each = recent.reduce((sum, one) => sum + one, 0) / recent.length;
  const going = live && !run.outcome;
  const elapsed = run.began ? ((going ? Date.now() : Date.parse(run.last)) - Date.parse(run.began)) / 1000 : null;
  const legal = { halt: ["training", "evaluating"], continue: ["halted"], skip: ["halted"], checkpoint: ["training", "evaluating", "halted"] };
  for (const button of document.querySelectorAll("[data-act]")) {
    const phases = legal[button.dataset.act];
    button.disabled = !going || (phases && !phases.includes(status.phase));
  }
  facts([
    ["step", `${step} of ${steps || "-"}`], ["loss", figure(live ? status.loss : run.loss.mean.at(-1))],
    ["seconds per step", figure(each)], ["samples per second", figure(run.samples && each ? run.samples / each : null)],
    ["elapsed", duration(elapsed)], ["time left", going ? duration((steps - step) * each) : "-"],
    ["bits", !live || status.exact === null ? "-" : status.exact ? "exact" : "mixed"],
    ["queued runs", String((status.queued_runs ?? []).length)],
    ...(live && going ? [["waiting for", status.waiting_for || "nothing", true]] : []),
    ...(live && status.weights_digest ? [["weights digest", status.weights_digest, true]] : []),
  ]);
  drawCurve("chart-loss", run.loss, other?.loss, true);
  drawCurve("chart-time", run.step_s, other?.step_s, false);
  drawEvaluations(run, other);
  drawWorkers(run);
  showWorkers(run, live || !run.run_id ? status.workers : []);
  rows($("events"), [...run.events].reverse().map(event => ({
    cells: [new Date(event.time).toLocaleString(), event.step, event.what, event.worker, event.text],
    kind: ["halted", "failed"].includes(event.what) ? "alarm" : "",
  })));
}
function showWorkers(run, here) {
  const present = here.map(worker => ({
    cells: [worker.name, worker.late ? `${worker.state}, late` : worker.state, `${worker.device || "-"} (${worker.backend})`,
      worker.microbatches_of_step, figure(worker.ms_per_microbatch), `${figure(worker.last_seen_s)} s ago`, worker.signature],
    button: revoking(worker.name),
  }));
  const names = new Set(here.map(worker => worker.name));
  const gone = run.workers.filter(worker => !names.has(worker.name)).map(worker => ({
    cells: [worker.name, worker.here ? "was here at the end" : `gone: ${worker.why}`, `${worker.device || "-"} (${worker.backend})`, "", "",
      new Date(worker.since).toLocaleTimeString(), worker.signature, ""],
    kind: "gone",
  }));
  // A button that has the focus stays.
  if (!$("workers").contains(document.activeElement)) rows($("workers"), [...present, ...gone]);
}
function revoking(name) {
  const button = Object.assign(document.createElement("button"), { type: "button", textContent: "Revoke" });
  button.setAttribute("aria-label", `Revoke ${name}`);
  button.addEventListener("click", () => act(`Revoke ${name}? It is sent away, its key and the join token count no more.`,
    "Revoke", () => tell("revoke", { name })));
  return button;
}

// Acting: each is what the command does, and is asked for twice.
async function act(question, word, action) {
  $("question").textContent = question;
  $("yes").textContent = word;
  $("confirm").returnValue = "no";
  $("confirm").showModal();
  await new Promise(resolve => $("confirm").addEventListener("close", resolve, { once: true }));
  if ($("confirm").returnValue !== "yes") return;
  try {
    await action();
    $("acted").textContent = `${word}: done.`;
  } catch (error) { $("acted").textContent = `${word}: ${error.message}`; }
  soon();
}
const ACTS = {
  halt: ["Halt the run within its step?", "Halt", () => tell("halt")],
  continue: ["Continue the halted run?", "Continue", () => tell("continue", { skip_step: false })],
  skip: ["Continue, and leave this step out? Its samples are covered and nothing is applied.", "Skip the step", () => tell("continue", { skip_step: true })],
  checkpoint: ["Write a checkpoint of the present state?", "Checkpoint", () => tell("checkpoint")],
  drain: ["Drain? The step in progress is finished, then the coordinator's run ends; resume goes on.", "Drain", () => tell("drain")],
};
for (const button of document.querySelectorAll("[data-act]")) button.addEventListener("click", () => act(...ACTS[button.dataset.act]));

$("join").addEventListener("click", async () => {
  const { lines } = await read("join");
  const line_ = (lines.find(each => each.includes("SAMESTEP_TOKEN")) ?? lines[0]).replace("listening for workers:", "").trim();
  try {
    await navigator.clipboard.writeText(line_);
    $("joined").textContent = "Copied. It holds the join token: paste it on members' machines only.";
  } catch { $("joined").textContent = line_; }
});
$("report").addEventListener("click", async () => {
  try {
    const run = $("run").value;
    const page = await (await ask(`report${run ? `?${new URLSearchParams({ run })}` : ""}`)).blob();
    const link = Object.assign(document.createElement("a"), { href: URL.createObjectURL(page), download: `${run || "run"}-report.html` });
    link.click();
    URL.revokeObjectURL(link.href);
    $("acted").textContent = "The report is saved.";
  } catch (error) { $("acted").textContent = error.message; }
});

let checking = 0;
$("spec").addEventListener("input", async () => {
  const mine = ++checking;
  $("submit").disabled = true;
  await sleep(300);
  if (mine !== checking) return;
  try {
    const { run } = await (await ask("check", { method: "POST", body: $("spec").value })).json();
    if (mine !== checking) return;
    $("verdict").textContent = `${run.task}, ${run.steps} steps: can be submitted.`;
    $("submit").disabled = false;
    $("submit").onclick = () => act(`Submit ${run.name}: ${run.task}, ${run.steps} steps?`, "Submit", () => tell("submit", { run }));
  } catch (error) { if (mine === checking) $("verdict").textContent = error.message; }
});

// Coming up to date.
async function refresh() {
  try {
    const [status, runs] = await Promise.all([read("status"), read("runs")]);
    shown.status = status;
    $("ask").hidden = $("lost").hidden = true;
    $("shown").hidden = $("picks").hidden = false;
    if (!$("ask").contains(document.activeElement)) $("refused").hidden = true;
    const known = [...new Set([status.run_id, ...runs.runs].filter(Boolean))];
    const chosen = $("run").value;
    // Who looks at the present run goes on to the next one.
    const wanted = chosen && chosen !== shown.present && known.includes(chosen) ? chosen : status.run_id ?? known[0] ?? "";
    shown.present = status.run_id ?? "";
    options($("run"), known.length ? known.map(run => [run, run]) : [["", "no run yet"]], wanted);
    options($("beside"), [["", "no other"], ...known.filter(run => run !== wanted).map(run => [run, run])], $("beside").value || "");
    if (!wanted) return empty(status);
    const run = await follow(wanted);
    const beside = $("beside").value ? await follow($("beside").value) : null;
    showRun(run, status, beside);
  } catch (error) {
    if (error instanceof Refused) return;
    $("lost").hidden = !(error instanceof TypeError);
    if (!(error instanceof TypeError)) $("acted").textContent = error.message;
  }
}
function empty(status) {
  $("phase").textContent = status.phase;
  $("phase").className = "pill warn";
  $("reason").textContent = status.reason;
  facts([["workers", `${status.workers.length} of ${status.expect_workers}`], ["address", status.address]]);
  for (const id of [...Object.values(CURVES), "chart-eval", "chart-workers"]) chart(id, [], [], [[]]);
  showWorkers({ workers: [] }, status.workers);
  for (const button of document.querySelectorAll("[data-act]")) button.disabled = button.dataset.act !== "drain";
  rows($("events"), []);
}
let due = false, refreshing = Promise.resolve();
function soon() {
  if (due) return;
  due = true;
  setTimeout(() => { due = false; refreshing = refreshing.then(refresh); }, 700);
}
for (const id of ["run", "beside", "metric"]) $(id).addEventListener("change", () => { shown.present = null; refresh(); });
addEventListener("resize", () => {
  for (const [id, each] of Object.entries(shown.charts)) each.setSize({ width: Math.max(200, $(id).clientWidth), height: 220 });
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", refresh);

// Events come as they happen, by a streamed fetch: EventSource cannot carry the token.
async function listen() {
  let last = "", pause = 500;
  for (;;) {
    try {
      const answer = await ask("events", { headers: last ? { "Last-Event-ID": last } : {} });
      pause = 500;
      soon();
      const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
      for (let rest = ""; ;) {
        const { value, done } = await reader.read();
        if (done) break;
        const lines = (rest + value).split("\n");
        rest = lines.pop();
        for (const one of lines) if (one.startsWith("id: ")) last = one.slice(4);
        soon();
      }
    } catch (error) { if (!(error instanceof Refused)) $("lost").hidden = false; }
    while (!$("ask").hidden) await sleep(200);
    await sleep(pause = Math.min(pause * 2, 5000));
  }
}
setInterval(() => { if ($("ask").hidden) soon(); }, 5000);
refresh().then(listen);
