// Pointer, wheel, keys and buttons: what is under the pointer, what is selected, and how the view changes.

const NEAR = 4; // pixels
const card = byId("card");
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
    byId("range").textContent = rangeWords();
  }
  hovered = pointer && !drag ? pick(...pointer) : null;
  drawOverlay();
  showCard();
  asked = "";
}

// ---- what is under the pointer ----

/** @returns {Thing | null} */
function pick(px, py) {
  if (py < TOP || px > GUTTER + laneWidth()) return null;
  if (px < GUTTER) {
    const named = page.lanes.find(({ y, pitch }) => py + view.top >= y && py + view.top < y + pitch);
    return named ? { kind: "lane", timeline: named.timeline, rank: named.rank, index: null } : null;
  }
  const y = py + view.top, time = timeAt(px);
  const lane = page.lanes.find(({ y: top, box, pitch }) => y >= top - 1 && y <= top + (pitch < LEAST_ROOMY ? pitch : box + 1));
  if (lane) return pickCompute(lane, time);
  return pickCollective(px, y) || pickMessage(px, y) || pickCurve(y, time);
}

/** @returns {Thing} */
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

/** @returns {Thing | null} */
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

/** @returns {Thing | null} */
function pickMessage(px, y) {
  /** @type {Thing} */
  let nearest = null;
  let least = NEAR;
  for (const timeline of timelines)
    for (const index of arrows(timeline)) {
      const distance = distanceToSegment(px, y, ...arrowEnds(timeline, index));
      if (distance < least)
        [nearest, least] = [{ kind: "message", timeline, rank: timeline.messages.rank[index], index }, distance];
    }
  return nearest;
}

function distanceToSegment(px, py, fromX, fromY, toX, toY) {
  const [dx, dy] = [toX - fromX, toY - fromY];
  const along = ((px - fromX) * dx + (py - fromY) * dy) / (dx * dx + dy * dy || 1);
  const share = Math.min(Math.max(along, 0), 1);
  return Math.hypot(px - fromX - share * dx, py - fromY - share * dy);
}

/** @returns {Thing | null} */
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

// ---- what is selected, and the range that is picked ----

/** Select a thing, or nothing: it stays framed, its words stay beside the lanes, and are read out. */
function select(what) {
  selected = what;
  picked = null;
  showDetails();
  redraw();
}

function pickRange(from, to) {
  picked = [Math.max(Math.min(from, to), 0), Math.min(Math.max(from, to), longest)];
  selected = null;
  showDetails();
  redraw();
}

function showDetails() {
  const details = byId("details");
  details.hidden = !selected && !picked;
  if (details.hidden) return;
  const close = make("button", { className: "close", title: "close (Esc)", onclick: clearSelection, attributes: { "aria-label": "close" } }, "×");
  details.replaceChildren(close, ...(picked ? rangeDetails(...picked) : thingDetails(selected)));
}

function clearSelection() {
  selected = picked = null;
  showDetails();
  redraw();
}

function thingDetails(what) {
  const [headline, ...lines] = cardLines(what);
  const paragraphs = lines.map((words, k) => make("p", { className: k ? "" : "muted" }, words));
  return [make("b", {}, headline), ...paragraphs, make("div", { className: "actions" }, ...actionsFor(what))];
}

/** What can be done with a thing: buttons. */
function actionsFor({ kind, timeline, rank, index }) {
  const action = (words, onclick) => make("button", { onclick }, words);
  const found = [];
  if (kind === "compute" && data.pipeline) found.push(action("code", () => showCode(timeline, rank, index)));
  if (kind === "compute") found.push(action("zoom to it", () => zoomTo(timeline, index)));
  const curve = isMemory(timeline) && timeline.memory[rank];
  if (curve) found.push(action("what is held at the peak", () => selectPeak(timeline, rank)));
  return found;
}

function selectPeak(timeline, rank) {
  const curve = timeline.memory[rank], index = peakIndex(curve);
  select({ kind: "curve", timeline, rank, index, time: curve.time[index] });
}

/** The sums of the ranks in a range. */
function rangeDetails(from, to) {
  const zoomIn = () => {
    show(from, to);
    clearSelection();
  };
  return [
    make("b", {}, range(from, to)),
    make("p", { className: "muted" }, `${duration(to - from)} of each rank`),
    make("div", { className: "actions" }, make("button", { onclick: zoomIn }, "zoom to it")),
    ...timelines.map((timeline) => sumsTable([[timeline, timeline.peaks.map((_, rank) => sumsBetween(timeline, rank, from, Math.min(to, timeline.makespan)))]], to - from, timelines.length > 1 ? timeline.name : "")),
  ];
}

// ---- how the view changes ----

/** Show `factor` times as much time, with the time at `px` where it is. */
function zoom(factor, px = GUTTER + laneWidth() / 2) {
  const share = Math.min(Math.max((px - GUTTER) / laneWidth(), 0), 1);
  const length = Math.min((view.end - view.start) * factor, longest);
  const start = view.start + share * (view.end - view.start - length);
  show(start, start + length);
}

/** Make the lanes higher, and keep the one in the middle where it is. */
function zoomRows(factor, py = page.height / 2) {
  const middle = page.lanes.find(({ y, pitch }) => y + pitch > view.top + py) ?? page.lanes[0];
  view.rows = Math.min(Math.max(view.rows * factor, 0.1), 2000);
  layOut();
  const placed = middle?.timeline.lanes[middle.rank];
  if (placed) view.top = placed.y - py;
  layOut();
}

const pan = (pixels) => show(view.start + pixels / scale(), view.end + pixels / scale());

function scroll(pixels) {
  view.top += pixels;
  layOut();
}

function fit() {
  view.rows = 1;
  layOut();
  show(0, longest);
}

/** Show a compute with some time around it. */
function zoomTo(timeline, index) {
  const { start, end, rank } = timeline.computes;
  const room = Math.max((end[index] - start[index]) * 6, longest * 1e-5);
  const middle = (start[index] + end[index]) / 2;
  show(middle - room, middle + room);
  const lane = timeline.lanes[rank[index]];
  if (lane.pitch < LEAST_ROOMY) zoomRows(LEAST_PITCH / lane.pitch);
  scrollTo(timeline.lanes[rank[index]]);
  redraw();
}

/** Bring a compute into view, without another scale unless it would be too small to see. */
function reveal(timeline, index) {
  const { start, end, rank } = timeline.computes;
  if ((end[index] - start[index]) * scale() < LEAST_WIDTH) return zoomTo(timeline, index);
  if (start[index] < view.start || end[index] > view.end) {
    const half = (view.end - view.start) / 2;
    show(start[index] - half, start[index] + half);
  }
  scrollTo(timeline.lanes[rank[index]]);
}

function toggle(name) {
  shown[name] = !shown[name];
  byId(name).setAttribute("aria-pressed", String(shown[name]));
  layOut();
}

function resize() {
  const { width, height } = canvas.getBoundingClientRect();
  if (!width || !height) return;
  Object.assign(page, { width, height });
  for (const pen of [ctx, overlay]) {
    Object.assign(pen.canvas, { width: width * devicePixelRatio, height: height * devicePixelRatio });
    pen.scale(devicePixelRatio, devicePixelRatio);
  }
  layOut();
  redraw();
}

// ---- events ----

const at = (event) => [event.offsetX, event.offsetY];

let settling = 0;

/** Draw in a hurry, and all of it once nothing has moved for a moment. */
function redrawMoving() {
  isMoving = true;
  clearTimeout(settling);
  settling = setTimeout(() => {
    isMoving = false;
    redraw();
  }, 150);
  redraw();
}

canvas.addEventListener("wheel", (event) => {
  event.preventDefault();
  const { deltaX, deltaY } = event;
  if (event.altKey) zoomRows(Math.exp(-deltaY * 0.0015), event.offsetY);
  else if (event.offsetX < GUTTER) scroll(deltaY);
  else if (event.shiftKey || Math.abs(deltaX) > Math.abs(deltaY)) pan(deltaX || deltaY);
  else zoom(Math.exp(deltaY * 0.0015), event.offsetX);
  redrawMoving();
}, { passive: false });

canvas.addEventListener("pointerdown", (event) => {
  canvas.setPointerCapture(event.pointerId);
  const kind = event.offsetY < TOP ? "zoom" : event.shiftKey ? "pick" : "move";
  drag = { kind, from: at(event), last: at(event), far: false };
  redraw("overlay");
});

canvas.addEventListener("pointermove", (event) => {
  pointer = at(event);
  if (drag) drag.far ||= Math.hypot(pointer[0] - drag.from[0], pointer[1] - drag.from[1]) > NEAR;
  if (drag?.kind === "pick" || drag?.kind === "zoom") selection = [drag.from[0], pointer[0]];
  if (drag?.kind === "move" && drag.far) {
    pan(drag.last[0] - pointer[0]);
    scroll(drag.last[1] - pointer[1]);
    drag.last = pointer;
  }
  if (drag?.kind === "move" && drag.far) redrawMoving();
  else redraw("overlay");
});

canvas.addEventListener("pointerup", (event) => {
  const { kind, far } = drag ?? {};
  const times = selection?.map(timeAt).sort((one, other) => one - other);
  selection = drag = null;
  if (!far && kind !== "zoom") select(pick(...at(event)));
  else if (kind === "zoom" && times) show(...times);
  else if (kind === "pick" && times) pickRange(...times);
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

// ---- the same by keys ----

/** Select the next cell on the rank, or the one at the same time on another lane. */
function step(cells, lanes = 0) {
  const ordered = page.lanes;
  const current = selected?.kind === "compute" ? selected : null;
  const at = current ? ordered.indexOf(current.timeline.lanes[current.rank]) : 0;
  const lane = ordered[Math.min(Math.max(at + lanes, 0), ordered.length - 1)];
  if (!lane) return;
  const { timeline, rank } = lane, [begin, last] = [timeline.first[rank], timeline.first[rank + 1]];
  const time = current ? current.timeline.computes.start[current.index] : view.start;
  let index = lanes || !current ? firstAbove(timeline.computes.end, time, begin, last) : current.index + cells;
  index = Math.min(Math.max(index, begin), last - 1);
  if (index < begin) return;
  reveal(timeline, index);
  select({ kind: "compute", timeline, rank, index });
}

/** @type {Record<string, () => void>} */
const actions = {
  fit, in: () => zoom(1 / 1.5), out: () => zoom(1.5), higher: () => zoomRows(1.5), flatter: () => zoomRows(1 / 1.5),
  ...Object.fromEntries(Object.keys(shown).map((name) => [name, () => toggle(name)])),
};
const keys = {
  "+": actions.in, "=": actions.in, "-": actions.out, 0: fit, "*": actions.higher, _: actions.flatter,
  c: actions.critical, m: actions.messages,
  ArrowLeft: () => pan(-80), ArrowRight: () => pan(80),
  ArrowUp: () => scroll(-60), ArrowDown: () => scroll(60),
  n: () => step(1), p: () => step(-1), j: () => step(0, 1), k: () => step(0, -1),
  z: () => (picked ? show(...picked) : selected?.kind === "compute" && zoomTo(selected.timeline, selected.index)),
  Enter: () => selected?.kind === "compute" && data.pipeline && showCode(selected.timeline, selected.rank, selected.index),
  Escape: () => clearSelection(),
  "/": () => byId("search").focus(),
  "?": () => byId("keys").showModal(),
};

for (const [name, action] of Object.entries(actions))
  byId(name).addEventListener("click", () => {
    action();
    redraw();
  });

addEventListener("keydown", (event) => {
  const { tagName } = /** @type {Element} */ (event.target);
  const typing = /^(INPUT|SELECT|TEXTAREA)$/.test(tagName) && event.key !== "Escape";
  const pressing = tagName === "BUTTON" && event.key === "Enter";
  const action = keys[event.key];
  if (!action || typing || pressing || byId("keys").open || event.ctrlKey || event.metaKey || event.altKey) return;
  if (!LANE_TABS.includes(view.tab) && event.key !== "?" && event.key !== "/") return;
  event.preventDefault();
  action();
  redraw();
});
