// What every plot over the steps shares: frame, axes, cursor, zoom, keyboard.

/** One for the page: all plots zoom together and show the same step. */
const view = { smoothing: 0.6, range: null, cursor: null, plots: [] };

function node(name, attributes = {}, ...children) {
  const made = document.createElementNS('http://www.w3.org/2000/svg', name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function html(name, className, text) {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

class Plot {
  /** `steps`: the first and the last step that the plot knows. */
  constructor(host, steps, height) {
    this.host = host;
    this.steps = steps[0] === steps[1] ? [steps[0] - 1, steps[1] + 1] : steps;
    this.height = height;
    this.legend = host.appendChild(html('div', 'legend'));
    this.svg = host.appendChild(node('svg', { tabindex: 0, role: 'img' }));
    this.tooltip = host.appendChild(html('div', 'tooltip'));
    this.tooltip.hidden = true;
    this.clip = `clip-${view.plots.length}`;
    view.plots.push(this);
    this.listen();
  }

  range() {
    return view.range ?? this.steps;
  }

  /** Frame and axes; the heirs draw what is in it. */
  draw() {
    this.width = Math.max(200, this.host.clientWidth);
    this.svg.setAttribute('viewBox', `0 0 ${this.width} ${this.height}`);
    this.svg.setAttribute('height', this.height);
    this.svg.replaceChildren();
    const domain = this.domain();
    const labels = this.labels(domain);
    const left = Math.max(46, 14 + 6.6 * Math.max(...labels.map(([, text]) => text.length)));
    this.box = { left, right: this.width - 14, top: 10, bottom: this.height - 24 };
    this.x = linearScale(...this.range(), this.box.left, this.box.right);
    this.y = this.vertical(domain);
    this.svg.append(node('defs', {}, node('clipPath', { id: this.clip }, node('rect', {
      x: left - 5, y: 0, width: this.box.right - left + 10, height: this.height }))));
    this.axes(labels);
    this.inside = node('g', { 'clip-path': `url(#${this.clip})` });
    this.overlay = node('g', { class: 'overlay', 'clip-path': `url(#${this.clip})` });
    this.svg.append(this.inside, this.overlay);
    this.drawInside();
    this.drawCursor();
  }

  axes(labels) {
    const { left, right, top, bottom } = this.box;
    const axes = node('g', { class: 'axes', 'aria-hidden': 'true' });
    for (const [value, text] of labels) {
      const y = this.y(value);
      if (y < top - 1 || y > bottom + 1) continue;
      axes.append(node('line', { x1: left, x2: right, y1: y, y2: y }),
        node('text', { x: left - 8, y: y + 4, 'text-anchor': 'end' }, text));
    }
    const ticks = this.x.ticks(Math.max(2, (right - left) / 90)).filter(Number.isInteger);
    const texts = formatTicks(ticks, '');
    ticks.forEach((tick, i) => {
      const x = this.x(tick);
      const half = 3.3 * texts[i].length;
      const anchor = x + half > this.width ? 'end' : 'middle';
      axes.append(node('line', { x1: x, x2: x, y1: bottom, y2: bottom + 4, class: 'tick' }),
        node('text', { x: anchor === 'end' ? this.width : x, y: bottom + 18, 'text-anchor': anchor }, texts[i]));
    });
    axes.append(node('line', { x1: left, x2: right, y1: bottom, y2: bottom, class: 'base' }),
      node('text', { x: left - 14, y: bottom + 18, 'text-anchor': 'end' }, 'step'));
    this.svg.append(axes);
  }

  drawCursor() {
    if (!this.overlay) return;
    this.overlay.replaceChildren();
    if (view.cursor !== null) {
      const x = this.x(view.cursor);
      this.overlay.append(
        node('line', { x1: x, x2: x, y1: this.box.top, y2: this.box.bottom, class: 'cursor' }));
    }
    this.drawReading();
  }

  listen() {
    const svg = this.svg;
    svg.addEventListener('pointermove', (event) => {
      if (this.from !== undefined) this.drawBrush(this.pixel(event));
      setCursor(this.x.invert(this.pixel(event)));
      this.showTooltip(this.pixel(event));
    });
    svg.addEventListener('pointerleave', () => { this.tooltip.hidden = true; setCursor(null); });
    svg.addEventListener('pointerdown', (event) => {
      if (event.pointerType === 'touch' || event.button !== 0) return;
      this.from = this.pixel(event);
      svg.setPointerCapture(event.pointerId);
    });
    svg.addEventListener('pointerup', (event) => this.endBrush(this.pixel(event)));
    svg.addEventListener('pointercancel', () => this.endBrush(this.from));
    svg.addEventListener('dblclick', () => setRange(null));
    svg.addEventListener('keydown', (event) => this.onKey(event));
    svg.addEventListener('blur', () => { this.tooltip.hidden = true; setCursor(null); });
  }

  onKey(event) {
    const [first, last] = this.range();
    const stride = Math.max(1, Math.round((last - first) / (event.shiftKey ? 10 : 100)));
    const at = view.cursor ?? last;
    const to = { ArrowLeft: at - stride, ArrowRight: at + stride, Home: first, End: last }[event.key];
    if (event.key === 'Escape') setRange(null);
    if (to === undefined) return;
    event.preventDefault();
    setCursor(Math.min(last, Math.max(first, to)));
    this.showTooltip(this.x(view.cursor));
    document.getElementById('readout').textContent =
      `step ${this.stepAtCursor()}: ${this.readings().map((r) => `${r.label} ${r.text}`).join(', ')}`;
  }

  pixel(event) {
    const area = this.svg.getBoundingClientRect();
    const x = (event.clientX - area.left) * this.width / area.width;
    return Math.min(this.box.right, Math.max(this.box.left, x));
  }

  drawBrush(to) {
    const [a, b] = [this.from, to].sort((one, other) => one - other);
    this.brush?.remove();
    this.brush = node('rect', { x: a, width: b - a, y: this.box.top, class: 'brush',
      height: this.box.bottom - this.box.top });
    this.svg.append(this.brush);
  }

  endBrush(to) {
    this.brush?.remove();
    const [a, b] = [this.from, to].sort((one, other) => one - other);
    if (this.from !== undefined && b - a > 6) setRange([this.x.invert(a), this.x.invert(b)]);
    this.from = undefined;
  }

  showTooltip(x) {
    const readings = this.readings();
    this.tooltip.replaceChildren(html('b', '', `step ${this.stepAtCursor()}`));
    for (const reading of readings) {
      const line = html('div', reading.colour, '');
      line.append(html('i', 'key'), html('span', '', reading.label), html('b', '', reading.text));
      this.tooltip.append(line);
    }
    this.tooltip.hidden = readings.length === 0;
    const wide = this.tooltip.offsetWidth;
    const scaled = x * this.host.clientWidth / this.width;
    const right = scaled + 14 + wide > this.host.clientWidth;
    this.tooltip.style.left = `${Math.max(0, right ? scaled - 14 - wide : scaled + 14)}px`;
  }
}

function setCursor(step) {
  view.cursor = step;
  for (const plot of view.plots) plot.drawCursor();
}

function setRange(range) {
  view.range = range;
  document.getElementById('zoom-out').disabled = range === null;
  for (const plot of view.plots) plot.draw();
}
