// Drawing: the visible part of the lanes on a canvas, in the colours of the style sheet.

const LEAST_WIDTH = 3; // pixels below which boxes are drawn together with their neighbours
const MOST_ARROWS = 4000;
const FONT = getComputedStyle(document.body).fontFamily;

const canvas = document.getElementById("canvas");
const ctx = canvas.getContext("2d");
const overlay = document.getElementById("overlay").getContext("2d"); // what follows the pointer
let colors = {};
let strip = null; // the whole step in little, drawn once
let selection = null; // [from, to] in pixels, while a range is picked
let hovered = null; // what is under the pointer, as cardLines takes it

function readColors() {
  const style = getComputedStyle(document.documentElement);
  const surfaces = ["page", "lane", "line", "edge", "text", "muted", "ink", "curve", "critical", "focus"];
  const happening = [...data.phases, ...data.ops].map(({ key }) => key);
  const names = [...surfaces, "activation", "gradient", "other", ...happening];
  colors = Object.fromEntries(names.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
  for (const timeline of timelines)
    timeline.fills = data.phases.map(({ key }) => shades(colors[key], timeline.lastChunk + 1));
  strip = null;
}

/** `color`, such as #8cb8f2, and lighter ones for the later stages of a rank. */
function shades(color, count) {
  const channels = [1, 3, 5].map((at) => parseInt(color.slice(at, at + 2), 16));
  const mixed = (white) => channels.map((channel) => Math.round(channel + (255 - channel) * white));
  return Array.from({ length: count }, (_, k) => `rgb(${mixed((0.5 * k) / Math.max(count - 1, 1))})`);
}

const payloadColor = (payload) => colors[data.payloads[payload]] || colors.other;

function draw() {
  for (const timeline of timelines) timeline.visible = visibleMessages(timeline);
  fill(colors.page, 0, 0, page.width, page.height);
  ctx.save();
  ctx.translate(0, -view.top);
  const lanes = page.lanes.filter(({ y }) => y < view.top + page.height && y + MOST_PITCH > view.top + TOP);
  lanes.forEach(drawGutter);
  ctx.save();
  clipToLanes(ctx);
  drawLanes(lanes);
  ctx.restore();
  page.headers.forEach(drawHeader);
  ctx.restore();
  drawAxis();
  drawStrip();
  drawScrollbar();
}

function clipToLanes(pen) {
  pen.beginPath();
  pen.rect(GUTTER, view.top + TOP, laneWidth(), page.height);
  pen.clip();
}

function drawLanes(lanes) {
  for (const { y, box } of lanes) fill(colors.lane, GUTTER, y, laneWidth(), box);
  for (const [time] of ticks()) fill(colors.line, Math.round(x(time)), TOP, 1, page.bottom - TOP);
  lanes.forEach(drawCurve);
  timelines.forEach(drawMessages);
  const brush = { place: x, from: view.start, right: GUTTER + laneWidth(), detailed: true };
  drawGathered(ctx, gatherBoxes(lanes, brush));
  lanes.forEach(drawCollectives);
  if (shown.critical) timelines.forEach(drawCriticalMessages);
}

function fill(color, px, py, wide, high, alpha = 1) {
  ctx.globalAlpha = alpha;
  ctx.fillStyle = color;
  ctx.fillRect(px, py, wide, high);
  ctx.globalAlpha = 1;
}

function write(words, px, py, { color = colors.muted, size = 12, align = "left", weight = 400 } = {}) {
  ctx.fillStyle = color;
  ctx.textAlign = align;
  ctx.font = `${weight} ${size}px ${FONT}`;
  ctx.fillText(words, px, py);
}

// ---- what names the lanes ----

function drawHeader({ timeline, y }) {
  fill(colors.page, 0, y, page.width, HEADER);
  write(timeline.name, 16, y + 20, { color: colors.text, weight: 600, size: 13 });
  const from = Math.max(GUTTER, 30 + ctx.measureText(timeline.name).width);
  ctx.font = `400 12px ${FONT}`;
  write(shortened(timeline.summary, page.width - from - RIGHT), from, y + 20);
}

/** As much of the words as is no wider than that. */
function shortened(words, width) {
  if (ctx.measureText(words).width <= width) return words;
  let count = words.length;
  while (count && ctx.measureText(`${words.slice(0, count)}…`).width > width) count--;
  return `${words.slice(0, count)}…`;
}

function drawGutter({ timeline, rank, y, box, curveY, curve }) {
  const roomy = box + curve > 26;
  const among = shown.byRank ? timeline.name.slice(0, 12) : "";
  const name = among && !roomy ? `${timeline.numbers[rank]} ${among}` : timeline.names[rank];
  write(name, GUTTER - 10, y + (roomy ? box / 2 + 4 : box - 2), { color: colors.text, align: "right" });
  const peak = highest(curveOf(timeline, rank));
  const below = among || `≤ ${isMemory(timeline) ? bytes(peak) : `${peak} in flight`}`;
  if (roomy) write(below, GUTTER - 10, curveY + curve / 2 + 4, { size: 11, align: "right" });
}

/** Round times about 110 pixels apart, with their text. */
function ticks() {
  const [factor] = unitOf(view.end);
  const least = 110 / scale() / factor;
  const power = 10 ** Math.floor(Math.log10(least));
  const step = [1, 2, 5, 10].find((each) => each * power >= least * 0.999) * power;
  const from = Math.ceil(view.start / factor / step - 1e-9);
  const to = Math.floor(view.end / factor / step + 1e-9);
  const times = Array.from({ length: to - from + 1 }, (_, k) => (from + k) * step);
  return times.map((time) => [time * factor, String(+time.toPrecision(12))]);
}

function drawAxis() {
  fill(colors.page, 0, 0, page.width, TOP);
  write(`time, ${unitOf(view.end)[1]}`, 16, STRIP + 16);
  for (const [time, words] of ticks()) write(words, x(time), STRIP + 16, { align: "center" });
  fill(colors.edge, GUTTER, TOP - 1, laneWidth(), 1);
}

// ---- boxes ----

/** The boxes of the lanes by colour, for changing colours is what costs most, and their labels. */
function gatherBoxes(lanes, brush) {
  const found = { faded: new Map(), full: new Map(), labels: [] };
  for (const lane of lanes) gatherLane(lane, brush, found);
  return found;
}

/** A run of boxes too narrow to see becomes one box per phase. */
function gatherLane(lane, brush, found) {
  const { computes: { start, end }, first } = lane.timeline;
  const last = first[lane.rank + 1];
  let i = firstAbove(end, brush.from, first[lane.rank], last);
  while (i < last && brush.place(start[i]) < brush.right) {
    const left = brush.place(start[i]);
    const from = i;
    while (i < last && brush.place(start[i]) - left < LEAST_WIDTH && isNarrow(brush, start[i], end[i])) i++;
    if (i > from) gatherRun(lane, brush, found, from, i);
    else gatherBox(lane, brush, found, i++);
  }
}

const isNarrow = ({ place }, start, end) => place(end) - place(start) < LEAST_WIDTH;

const widths = new Float64Array(2 * data.phases.length); // of a phase, on the critical path or not
const members = new Int32Array(widths.length);

function gatherRun(lane, brush, found, from, to) {
  const { timeline } = lane, { start, end, phase } = timeline.computes;
  widths.fill(0);
  for (let i = from; i < to; i++) {
    const key = 2 * phase[i] + isCritical(timeline, i);
    widths[key] += brush.place(end[i]) - brush.place(start[i]);
    members[key] = i;
  }
  let left = brush.place(start[from]);
  widths.forEach((width, key) => {
    if (width > 0) addBox(lane, found, members[key], left, width);
    left += width;
  });
}

function gatherBox(lane, brush, found, i) {
  const { start, end } = lane.timeline.computes;
  const left = brush.place(start[i]);
  const width = brush.place(end[i]) - left - (brush.detailed ? 1 : 0);
  addBox(lane, found, i, left, width);
  if (brush.detailed && lane.box >= 11) addLabel(lane, found, i, left, width);
}

const isCritical = (timeline, i) => shown.critical && timeline.onPath.has(i);
const isFaded = (timeline, i) => shown.critical && !timeline.onPath.has(i);

function addBox({ timeline, y, box }, { faded, full }, i, left, width) {
  const { phase, chunk } = timeline.computes;
  addRect(isFaded(timeline, i) ? faded : full, timeline.fills[phase[i]][chunk[i]], left, y, width, box);
  const thick = Math.min(3, box / 4);
  if (isCritical(timeline, i)) addRect(full, colors.critical, left, y + box - thick, width, thick);
}

function addRect(rects, color, left, top, width, height) {
  const same = rects.get(color);
  if (same) same.push(left, top, width, height);
  else rects.set(color, [left, top, width, height]);
}

function addLabel({ timeline, y, box }, { labels }, i, left, width) {
  const from = Math.max(left, GUTTER), to = Math.min(left + width, GUTTER + laneWidth());
  const number = timeline.computes.microbatch[i];
  const texts = [boxLabel(timeline, i), number < 0 ? "" : String(number)];
  const text = texts.find((each) => each.length * 6.6 + 3 <= to - from);
  const color = isFaded(timeline, i) ? colors.muted : colors.ink;
  if (text) labels.push({ text, color, px: (from + to) / 2, py: y + box / 2 + 4 });
}

function drawGathered(pen, { faded, full, labels }) {
  const order = ([one], [other]) => (one === colors.critical) - (other === colors.critical);
  for (const [alpha, rects] of [[0.25, faded], [1, full]]) {
    pen.globalAlpha = alpha;
    for (const [color, same] of [...rects].sort(order)) {
      pen.fillStyle = color;
      for (let k = 0; k < same.length; k += 4) pen.fillRect(same[k], same[k + 1], same[k + 2], same[k + 3]);
    }
  }
  for (const { text, color, px, py } of labels) write(text, px, py, { color, size: 11, align: "center" });
}

// ---- collectives ----

/** Where a collective is drawn: [left, top, width, height]. Those of a rank that overlap share the band. */
function bandRect(timeline, i) {
  const { rank, start, end, row } = timeline.collectives;
  const { bandY, band } = timeline.lanes[rank[i]];
  const height = band / timeline.numRows;
  return [x(start[i]), bandY + row[i] * height, Math.max(x(end[i]) - x(start[i]), 1), height - 1];
}

function drawCollectives({ timeline, rank }) {
  for (const i of collectivesBetween(timeline, rank, view.start, view.end)) {
    const [left, top, width, height] = bandRect(timeline, i);
    const isOnPath = timeline.collectivesOnPath.has(i);
    fill(colors[data.ops[timeline.collectives.op[i]].key], left, top, width, height, shown.critical && !isOnPath ? 0.25 : 1);
    if (shown.critical && isOnPath) fill(colors.critical, left, top + height - 2, width, 2);
    const from = Math.max(left, GUTTER), to = Math.min(left + width, GUTTER + laneWidth());
    const text = collectiveLabel(timeline, i);
    if (height >= 10 && text.length * 6.6 + 3 <= to - from)
      write(text, (from + to) / 2, top + height / 2 + 4, { color: colors.ink, size: 10, align: "center" });
  }
}

// ---- curves ----

const curveTops = {};

/** The most that any rank holds, in any timeline: curves of one kind have one scale. */
function curveTop(kind) {
  const curves = timelines.flatMap((timeline) => timeline.curves[kind] ?? []);
  return (curveTops[kind] ??= Math.max(1, ...curves.map(highest)));
}

function drawCurve({ timeline, rank, curveY, curve }) {
  const { time, amount } = curveOf(timeline, rank);
  const unit = curve / curveTop(isMemory(timeline) ? "memory" : "inFlight");
  const bottom = curveY + curve;
  const last = x(Math.min(timeline.makespan, view.end));
  ctx.beginPath();
  ctx.moveTo(GUTTER, bottom);
  for (let i = Math.max(firstAbove(time, view.start) - 1, 0); i < time.length && time[i] <= view.end; i++) {
    ctx.lineTo(x(time[i]), bottom - unit * amount[i]);
    ctx.lineTo(i + 1 < time.length ? x(time[i + 1]) : last, bottom - unit * amount[i]);
  }
  ctx.lineTo(last, bottom);
  ctx.fillStyle = colors.curve;
  ctx.fill();
  fill(colors.line, GUTTER, bottom, laneWidth(), 1);
}

// ---- messages ----

/** The messages of microbatches on the way in the visible range. */
function visibleMessages({ messages: { start, end, microbatch } }) {
  const found = [];
  for (let i = 0; i < start.length; i++)
    if (microbatch[i] >= 0 && end[i] >= view.start && start[i] <= view.end) found.push(i);
  return found;
}

function isBlurred({ visible, lanes }) {
  return visible.length > Math.min(MOST_ARROWS, (laneWidth() * lanes.length) / 12);
}

/** Those to draw: none where arrows would only blur the picture. */
const arrows = (timeline) => (shown.messages && !isBlurred(timeline) ? timeline.visible : []);

/** Where an arrow begins and ends; activations and gradients that meet are drawn side by side. */
function arrowEnds(timeline, i) {
  const { rank, peer, start, end, payload } = timeline.messages;
  const source = timeline.lanes[rank[i]], target = timeline.lanes[peer[i]];
  const down = source.y < target.y;
  const aside = data.payloads[payload[i]] === "gradient" ? 2 : -2;
  return [
    x(start[i]) + aside, down ? source.y + source.box : source.y,
    x(end[i]) + aside, down ? target.y : target.y + target.box,
  ];
}

function drawMessages(timeline) {
  const drawn = arrows(timeline);
  ctx.globalAlpha = shown.critical ? 0.25 : 0.75;
  data.payloads.forEach((_, payload) => {
    const same = drawn.filter((i) => timeline.messages.payload[i] === payload);
    if (same.length) strokeMessages(ctx, timeline, same, payloadColor(payload), 1);
  });
  ctx.globalAlpha = 1;
}

function drawCriticalMessages(timeline) {
  strokeMessages(ctx, timeline, timeline.critical.messages, colors.critical, 2);
}

function strokeMessages(pen, timeline, indices, color, thickness) {
  const lines = new Path2D(), heads = new Path2D(), size = 4 + thickness;
  for (const i of indices) {
    const [fromX, fromY, toX, toY] = arrowEnds(timeline, i);
    const angle = Math.atan2(toY - fromY, toX - fromX);
    lines.moveTo(fromX, fromY);
    lines.lineTo(toX, toY);
    heads.moveTo(toX, toY);
    for (const turn of [-0.45, 0.45])
      heads.lineTo(toX - size * Math.cos(angle + turn), toY - size * Math.sin(angle + turn));
  }
  pen.strokeStyle = pen.fillStyle = color;
  pen.lineWidth = thickness;
  pen.stroke(lines);
  pen.fill(heads);
}

// ---- what follows the pointer ----

function drawOverlay() {
  overlay.clearRect(0, 0, page.width, page.height);
  overlay.save();
  overlay.translate(0, -view.top);
  clipToLanes(overlay);
  if (hovered) drawHovered(hovered);
  overlay.restore();
  if (!selection) return;
  overlay.globalAlpha = 0.2;
  overlay.fillStyle = colors.focus;
  overlay.fillRect(Math.min(...selection), 0, Math.abs(selection[1] - selection[0]), page.height);
  overlay.globalAlpha = 1;
}

/** Outline it, the message it waited for with that message's maker, and what does the same elsewhere. */
function drawHovered({ kind, timeline, index }) {
  if (index === null || kind === "curve") return;
  if (kind === "collective") return membersOf(timeline, index).forEach((i) => outlineCollective(timeline, i));
  if (kind !== "message" && timeline.computes.collective[index] >= 0)
    membersOf(timeline, timeline.computes.collective[index]).forEach((i) => outlineCollective(timeline, i));
  const message = kind === "message" ? index : timeline.computes.cause[index];
  if (message >= 0) {
    strokeMessages(overlay, timeline, [message], payloadColor(timeline.messages.payload[message]), 2.5);
    outline(timeline, timeline.messages.maker[message], colors.muted);
  }
  if (kind === "message") return;
  outline(timeline, index, colors.text);
  for (const other of timelines) outline(other, counterpart(timeline, other, index) ?? -1, colors.focus);
}

function outlineCollective(timeline, i) {
  const [left, top, width, height] = bandRect(timeline, i);
  overlay.strokeStyle = colors.text;
  overlay.lineWidth = 2;
  overlay.strokeRect(left - 0.5, top - 1, width + 1, height + 2);
}

function outline(timeline, i, color) {
  if (i < 0) return;
  const { rank, start, end } = timeline.computes;
  const { y, box } = timeline.lanes[rank[i]];
  overlay.strokeStyle = color;
  overlay.lineWidth = 2;
  overlay.strokeRect(x(start[i]) - 0.5, y - 1, Math.max(x(end[i]) - x(start[i]), 2), box + 2);
}

// ---- the strip above, and the scrollbar ----

const stripX = (time) => (time / longest) * laneWidth();

function drawnStrip() {
  const size = { width: laneWidth() * devicePixelRatio, height: (STRIP - 8) * devicePixelRatio };
  const whole = Object.assign(document.createElement("canvas"), size);
  const pen = whole.getContext("2d");
  pen.scale(devicePixelRatio, devicePixelRatio);
  const brush = { place: stripX, from: 0, right: laneWidth(), detailed: false };
  const box = (STRIP - 8) / page.lanes.length;
  const lanes = page.lanes.map(({ timeline, rank }, k) => ({ timeline, rank, y: k * box, box }));
  drawGathered(pen, gatherBoxes(lanes, brush));
  return whole;
}

/** The whole step, with what is not visible faded. */
function drawStrip() {
  strip ??= drawnStrip();
  const left = GUTTER + stripX(view.start), right = GUTTER + stripX(view.end);
  fill(colors.lane, GUTTER, 5, laneWidth(), STRIP - 6);
  ctx.drawImage(strip, GUTTER, 6, laneWidth(), STRIP - 8);
  fill(colors.page, GUTTER, 5, left - GUTTER, STRIP - 6, 0.75);
  fill(colors.page, right, 5, GUTTER + laneWidth() - right, STRIP - 6, 0.75);
  ctx.strokeStyle = colors.muted;
  ctx.lineWidth = 1;
  ctx.strokeRect(left + 0.5, 4.5, Math.max(right - left - 1, 2), STRIP - 5);
}

function drawScrollbar() {
  const room = page.height - TOP, all = page.bottom - TOP;
  const share = room / all;
  if (share < 1) fill(colors.edge, page.width - 9, TOP + view.top * share, 6, room * share);
}
