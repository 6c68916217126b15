// The model: its operators by stage and module, in the order in which they run, with the values that pass by.

const model = { root: null, open: new Set(), marked: null };

/** A tree of stages, modules and operators. Modules that repeat stand in one group. */
function buildModel() {
  const stages = data.pipeline.stages.map((_, stage) => ({ kind: "stage", key: `s${stage}`, stage, name: `stage ${stage}`, type: "", children: [] }));
  for (const operator of data.pipeline.operators) {
    let node = stages[operator.stage], path = "";
    for (const part of operator.module.split(".").filter(Boolean)) {
      path += path ? `.${part}` : part;
      let child = node.children.find(({ kind, name }) => kind === "module" && name === path);
      if (!child) node.children.push((child = { kind: "module", key: `${operator.stage}:${path}`, stage: operator.stage, name: path, type: "", children: [] }));
      node = child;
    }
    node.type ||= operator.type;
    node.children.push({ kind: "operator", key: `o${operator.number}`, stage: operator.stage, name: operator.call, type: operator.shape, operator, children: [] });
  }
  for (const stage of stages) stage.children = grouped(simplified(stage.children));
  model.root = { children: stages };
  model.open = new Set(stages.map(({ key }) => key));
}

/** Without lists of modules: their children take their place. */
function simplified(nodes) {
  return nodes.flatMap((node) => {
    if (node.kind === "operator") return [node];
    const children = simplified(node.children);
    const isList = !node.type && children.every(({ kind, name }) => kind === "module" && /^\d+$/.test(name.slice(node.name.length + 1)));
    if (isList) return children;
    return [{ ...node, children }];
  });
}

const signature = (node) =>
  node.kind === "operator" ? node.name : (node.signature ??= `${node.type}(${node.children.map(signature)})`);

/** Neighbours that are the same, such as the layers of a stage, in one node. */
function grouped(nodes) {
  const found = [];
  for (const node of nodes) {
    const last = found.at(-1);
    if (node.kind === "module" && last && last.like === signature(node)) last.nodes.push(node);
    else found.push({ like: node.kind === "module" ? signature(node) : null, nodes: [node] });
  }
  return found.map(({ nodes: same }) => {
    const inner = same.map((node) => ({ ...node, children: node.kind === "operator" ? [] : grouped(node.children) }));
    if (inner.length < 2) return inner[0];
    const name = `${inner[0].name} to ${inner.at(-1).name}`;
    return { kind: "group", key: `g${inner[0].key}`, stage: inner[0].stage, name, type: `${inner.length} × ${inner[0].type}`, children: inner };
  });
}

const operatorsOf = (node) => (node.kind === "operator" ? [node.operator] : node.children.flatMap(operatorsOf));

/** The rows that are visible. */
function visibleRows() {
  /** @type {any[]} */
  const rows = [];
  const visit = (node, depth) => {
    const isOpen = model.open.has(node.key);
    rows.push({ node, depth, isOpen });
    if (isOpen) node.children.forEach((child) => visit(child, depth + 1));
  };
  for (const stage of model.root.children) {
    visit(stage, 0);
    const cut = cutBehind(stage.stage);
    if (cut) rows.push(cut);
  }
  return rows;
}

/** The values that go from a stage to later ones, and their gradients. */
function cutBehind(stage) {
  const words = (link) => `${Object.entries(link.values).map(([name, size]) => `${name}, ${bytes(size)}`).join("; ")}`;
  const forth = data.pipeline.links.filter(({ source, payload }) => source === stage && payload === "activation");
  const back = data.pipeline.links.filter(({ target, payload }) => target === stage && payload === "gradient");
  if (!forth.length && !back.length) return null;
  const size = (links) => bytes(total(links.flatMap(({ values }) => Object.values(values))));
  const details = [...forth.map((link) => `to stage ${link.target}: ${words(link)}`), ...back.map((link) => `from stage ${link.source}: ${words(link)}`)];
  return { cut: `cut: ${size(forth)} forward, ${size(back)} back, for each microbatch`, details: details.join("\n"), depth: 0 };
}

function fillModel() {
  if (!model.root) buildModel();
  byId("modelRows").replaceChildren(...visibleRows().map((row) => (row.cut ? cutRow(row) : modelRow(row))));
  const tied = data.pipeline.tied.map(({ name, owner, borrowers, bytes: size }) => `${name} (${bytes(size)}) of stage ${owner} is used by stage ${borrowers.join(", ")}, too`);
  byId("tied").textContent = tied.length ? `Tied weights: ${tied.join("; ")}.` : "";
}

const cutRow = ({ cut, details }) => make("li", { className: "cut", title: details }, cut, make("small", {}, ` ${details.replaceAll("\n", " · ")}`));

function modelRow({ node, depth, isOpen }) {
  const count = operatorsOf(node).length;
  const flip = () => {
    if (!model.open.delete(node.key)) model.open.add(node.key);
    fillModel();
  };
  const isOperator = node.kind === "operator";
  const openCode = () => showLine(node.stage, operatorsOf(node)[0].line - 1);
  const label = isOperator
    ? make("button", { className: "plain", onclick: openCode, title: "its line of code" }, node.name)
    : make("button", { className: "plain", onclick: flip, attributes: { "aria-expanded": String(isOpen) } }, isOpen ? "▾ " : "▸ ", node.name);
  const source = isOperator ? node.operator.source : "";
  const weights = isOperator ? node.operator.weights.join(", ") : "";
  const row = make("li", {
    className: node.kind + (model.marked === node.key ? " marked" : ""),
    style: `padding-left: ${12 + 16 * depth}px; --stage: ${stageColor(node.stage)}`,
    attributes: { "data-key": node.key },
  }, label, make("span", { className: "muted" }, [node.type, source, weights, isOperator ? "" : `${count} operator${count > 1 ? "s" : ""}`].filter(Boolean).join(" · ")));
  if (count) row.append(make("button", { className: "small", onclick: openCode, title: "its code" }, "code"));
  const cells = node.kind === "stage" || isOperator ? `stage ${node.stage}` : `${node.kind === "group" ? node.children[0].name : node.name} stage ${node.stage}`;
  row.append(make("button", { className: "small", onclick: () => searchFor(cells), title: "its cells in the timeline" }, "cells"));
  return row;
}

/** Colours that tell neighbours apart, however many stages there are. */
const stageColor = (stage) => `hsl(${(stage * 137 + 210) % 360} 60% 55%)`;

/** Open the model at a stage, or at an operator of it. */
function showInModel(stage, number = -1) {
  if (!model.root) buildModel();
  const path = pathTo(model.root.children[stage], number) ?? [model.root.children[stage]];
  for (const node of path.slice(0, -1)) model.open.add(node.key);
  model.marked = path.at(-1).key;
  openTab("model");
  fillModel();
  byId("modelRows").querySelector(".marked")?.scrollIntoView({ block: "center" });
}

function pathTo(node, number) {
  if (node.operator?.number === number) return [node];
  for (const child of node.children) {
    const path = pathTo(child, number);
    if (path) return [node, ...path];
  }
  return null;
}

/** Show the cells that a search finds. */
function searchFor(text) {
  byId("search").value = text;
  openTab("timeline");
  search(text);
}
