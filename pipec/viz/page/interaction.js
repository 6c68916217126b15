// Pointer, wheel, keys and buttons: what is under the pointer, and how the view changes.

const NEAR = 4; // pixels
const card = document.getElementById("card");
let pointer = null; // where it is on the canvas, [x, y]
let drag = null; // {kind, from: [x, y], last: [x, y]} while a button is down
let asked = ""; // what the next frame draws: "", "overlay" or "all"

/** Draw in the next frame: all of the page, or what follows the pointer. */
function redraw(what = "all") {
  if (!asked) requestAnimationFrame(drawFrame);
  if (asked !== "all") asked = what;
}

function drawFrame() {
  if (asked === "all") {
    draw();
    document.getElementById("range").textContent = rangeWords();
  }
  hovered = pointer && !drag ? pick(...pointer) : null;
  drawOverlay();
  showCard();
  asked = "";
}

// ---- what is under the pointer ----

function pick(px, py) {
  if (py < TOP || px < GUTTER || px > GUTTER + laneWidth()) return null;
  const y = py + view.top, time = timeAt(px);
  const lane = page.lanes.find((each) => y >= each.y - 1 && y <= each.y + each.box + 1);
  if (lane) return pickCompute(lane, time);
  return pickCollective(px, y) || pickMessage(px, y) || pickCurve(y, time);
}

function pickCompute({ timeline, rank }, time) {
  const { computes: { start, end }, first } = timeline;
  const next = firstAbove(end, time, first[rank], first[rank + 1]);
  const near = NEAR / 2 / scale();
  const isNext = next < first[rank + 1];
  if (isNext && start[next] - near <= time) return { kind: "compute", timeline, rank, index: next };
  if (next > first[rank] && time <= end[next - 1] + near)
    return { kind: "compute", timeline, rank, index: next - 1 };
  return { kind: "idle", timeline, rank, index: isNext ? next : null, time };
}

function pickCollective(px, y) {
  const lane = page.lanes.find(({ bandY, band }) => y >= bandY && y <= bandY + band);
  if (!lane) return null;
  const { timeline, rank } = lane, near = NEAR / 2 / scale(), time = timeAt(px);
  const under = collectivesBetween(timeline, rank, time - near, time + near);
  const index = under.find((i) => {
    const [, top, , height] = bandRect(timeline, i);
    return y >= top - 1 && y <= top + height + 1;
  });
  return index === undefined ? null : { kind: "collective", timeline, rank, index };
}

function pickMessage(px, y) {
  let nearest = null, least = NEAR;
  for (const timeline of timelines)
    for (const index of arrows(timeline)) {
      const distance = distanceToSegment(px, y, ...arrowEnds(timeline, index));
      if (distance < least) [nearest, least] = [{ kind: "message", timeline, index }, distance];
    }
  return nearest;
}

function distanceToSegment(px, py, fromX, fromY, toX, toY) {
  const [dx, dy] = [toX - fromX, toY - fromY];
  const along = ((px - fromX) * dx + (py - fromY) * dy) / (dx * dx + dy * dy || 1);
  const share = Math.min(Math.max(along, 0), 1);
  return Math.hypot(px - fromX - share * dx, py - fromY - share * dy);
}

function pickCurve(y, time) {
  const lane = page.lanes.find(({ curveY, curve }) => y >= curveY && y <= curveY + curve);
  if (!lane || time > lane.timeline.makespan) return null;
  const { timeline, rank } = lane;
  const index = firstAbove(curveOf(timeline, rank).time, time) - 1;
  return index < 0 ? null : { kind: "curve", timeline, rank, index, time };
}

function showCard() {
  card.hidden = !hovered;
  if (!hovered) return;
  const line = (textContent, k) =>
    Object.assign(document.createElement(k ? "p" : "b"), { textContent, className: k === 1 ? "muted" : "" });
  card.replaceChildren(...cardLines(hovered).map(line));
  const [px, py] = pointer;
  const left = px + 16 + card.offsetWidth > page.width ? px - 16 - card.offsetWidth : px + 16;
  const top = py + 16 + card.offsetHeight > page.height ? py - 16 - card.offsetHeight : py + 16;
  card.style.left = `${Math.max(left, 4)}px`;
  card.style.top = `${Math.max(top, 4)}px`;
}

// ---- how the view changes ----

/** Show `factor` times as much time, with the time at `px` where it is. */
function zoom(factor, px = GUTTER + laneWidth() / 2) {
  const share = Math.min(Math.max((px - GUTTER) / laneWidth(), 0), 1);
  const length = Math.min((view.end - view.start) * factor, longest);
  const start = view.start + share * (view.end - view.start - length);
  show(start, start + length);
}

const pan = (pixels) => show(view.start + pixels / scale(), view.end + pixels / scale());

function scroll(pixels) {
  view.top += pixels;
  layOut();
}

function fit() {
  show(0, longest);
}

function toggle(name) {
  shown[name] = !shown[name];
  document.getElementById(name).setAttribute("aria-pressed", shown[name]);
  strip = null;
  layOut();
}

function resize() {
  const { width, height } = canvas.getBoundingClientRect();
  Object.assign(page, { width, height });
  for (const pen of [ctx, overlay]) {
    Object.assign(pen.canvas, { width: width * devicePixelRatio, height: height * devicePixelRatio });
    pen.scale(devicePixelRatio, devicePixelRatio);
  }
  strip = null;
  layOut();
  redraw();
}

/** The times of a picked range; on the strip they are those of the whole step. */
function pickedTimes([fromX, fromY], toX) {
  const time = fromY < STRIP ? (px) => ((px - GUTTER) / laneWidth()) * longest : timeAt;
  return [time(Math.min(fromX, toX)), time(Math.max(fromX, toX))];
}

// ---- events ----

const at = (event) => [event.offsetX, event.offsetY];

canvas.addEventListener("wheel", (event) => {
  event.preventDefault();
  const { deltaX, deltaY } = event;
  if (event.offsetX < GUTTER) scroll(deltaY);
  else if (event.shiftKey || Math.abs(deltaX) > Math.abs(deltaY)) pan(deltaX || deltaY);
  else zoom(Math.exp(deltaY * 0.0015), event.offsetX);
  redraw();
}, { passive: false });

canvas.addEventListener("pointerdown", (event) => {
  canvas.setPointerCapture(event.pointerId);
  const kind = event.shiftKey || event.offsetY < TOP ? "pick" : "move";
  drag = { kind, from: at(event), last: at(event) };
  redraw("overlay");
});

canvas.addEventListener("pointermove", (event) => {
  pointer = at(event);
  if (drag?.kind === "pick") selection = [drag.from[0], pointer[0]];
  if (drag?.kind === "move") {
    pan(drag.last[0] - pointer[0]);
    scroll(drag.last[1] - pointer[1]);
    drag.last = pointer;
  }
  redraw(drag?.kind === "move" ? "all" : "overlay");
});

canvas.addEventListener("pointerup", () => {
  if (selection && Math.abs(selection[1] - selection[0]) > NEAR)
    show(...pickedTimes(drag.from, selection[1]));
  selection = drag = null;
  redraw();
});

canvas.addEventListener("pointercancel", () => {
  selection = drag = null;
  redraw("overlay");
});

canvas.addEventListener("pointerleave", () => {
  pointer = null;
  redraw("overlay");
});

canvas.addEventListener("dblclick", () => {
  fit();
  redraw();
});

const actions = {
  fit, in: () => zoom(1 / 1.5), out: () => zoom(1.5),
  ...Object.fromEntries(Object.keys(shown).map((name) => [name, () => toggle(name)])),
};
const keys = {
  "+": actions.in, "=": actions.in, "-": actions.out, 0: fit,
  c: actions.critical, m: actions.messages, r: actions.byRank, b: actions.memory,
  ArrowLeft: () => pan(-80), ArrowRight: () => pan(80),
  ArrowUp: () => scroll(-60), ArrowDown: () => scroll(60),
};

for (const [name, action] of Object.entries(actions))
  document.getElementById(name).addEventListener("click", () => {
    action();
    redraw();
  });

addEventListener("keydown", (event) => {
  const action = keys[event.key];
  if (!action || event.ctrlKey || event.metaKey || event.altKey) return;
  event.preventDefault();
  action();
  redraw();
});

// ---- the page ----

function addLegend() {
  const legend = document.getElementById("legend");
  const add = (color, words, className = "") => {
    const mark = Object.assign(document.createElement("i"), { className });
    mark.style.background = `var(--${color})`;
    const entry = document.createElement("span");
    entry.append(mark, words);
    legend.append(entry);
  };
  data.phases.forEach(({ key, name }, i) => {
    if (timelines.some(({ computes }) => computes.phase.includes(i))) add(key, name);
  });
  data.ops.forEach(({ key, name }, i) => {
    if (timelines.some(({ collectives }) => collectives.op.includes(i))) add(key, name);
  });
  data.payloads.forEach((name, i) => {
    const drawn = ["activation", "gradient"].includes(name);
    if (drawn && timelines.some(({ messages }) => messages.payload.includes(i))) add(name, name, "arrow");
  });
  if (timelines.some(({ lastChunk }) => lastChunk)) legend.append("lighter: later stage");
  add("curve", timelines.some(({ curves }) => curves.memory) ? "in flight, or bytes" : "in flight");
}

document.getElementById("byRank").hidden = timelines.length === 1;
document.getElementById("memory").hidden = !timelines.some(({ curves }) => curves.memory);
canvas.setAttribute("aria-label", timelines.map(({ name, summary }) => `${name}: ${summary}`).join("; "));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  readColors();
  redraw();
});
addLegend();
readColors();
new ResizeObserver(resize).observe(canvas);
