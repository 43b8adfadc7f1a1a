// Curves over the steps: the readings, faint, and their running mean.

class LineChart extends Plot {
  constructor(host, spec, names, marks) {
    const steps = spec.lines.flatMap((line) => [line.x[0], line.x[line.x.length - 1]]);
    const main = host.closest('.main') !== null;
    super(host, [Math.min(...steps), Math.max(...steps)], main ? 320 : 210);
    this.main = main;
    this.spec = spec;
    this.names = names;
    this.marks = marks;
    this.log = false;
    const values = spec.lines.flatMap((line) => line.y).filter((value) => value !== null);
    this.canBeLog = values.length > 0 && values.every((value) => value > 0);
    this.smooth();
  }

  smooth() {
    for (const line of this.spec.lines) {
      line.smoothed = this.spec.noisy && !line.dots && view.smoothing > 0 && line.x.length > 2;
      line.drawn = line.smoothed ? runningMean(line.y) : line.y;
    }
  }

  name(line) {
    if (this.names.length === 1) return line.label;
    return this.spec.single ? this.names[line.run] : `${this.names[line.run]} ${line.label}`;
  }

  /** Smallest and largest value in sight, with some air. */
  domain() {
    const [first, last] = this.range();
    let low = Infinity;
    let high = -Infinity;
    for (const line of this.spec.lines) {
      line.y.forEach((value, i) => {
        if (value === null || line.x[i] < first || line.x[i] > last) return;
        low = Math.min(low, value);
        high = Math.max(high, value);
      });
    }
    if (low > high) return this.log ? [1, 10] : [0, 1];
    if (this.log) return low === high ? [low / 2, high * 2] : [low / 1.04, high * 1.04];
    if (this.spec.fromZero && low >= 0) return [0, high * 1.06 || 1];
    const air = (high - low) * 0.05 || Math.abs(high) * 0.1 || 1;
    return [low - air, high + air];
  }

  vertical(domain) {
    return (this.log ? logScale : linearScale)(...domain, this.box.bottom, this.box.top);
  }

  labels(domain) {
    const scale = (this.log ? logScale : linearScale)(...domain, 0, 1);
    const ticks = this.spec.unit === 'bytes' && !this.log
      ? byteTicks(...domain, this.height / 45) : scale.ticks(this.height / 45);
    const texts = formatTicks(ticks, this.spec.unit);
    return ticks.map((tick, i) => [tick, texts[i]]);
  }

  drawInside() {
    for (const mark of this.marks) {
      const x = this.x(mark.step);
      this.inside.append(
        node('line', { x1: x, x2: x, y1: this.box.top, y2: this.box.bottom, class: 'mark' }));
      if (this.main) this.inside.append(
        node('text', { x: x + 5, y: this.box.top + 10, class: 'mark' }, mark.label));
    }
    for (const line of this.spec.lines) this.drawLine(line);
    this.describe();
  }

  drawLine(line) {
    const group = node('g', { class: `c${line.colour % 6}${line.dashed ? ' dashed' : ''}` });
    if (line.low.length) group.append(node('path', { class: 'band', d: this.band(line) }));
    if (line.smoothed) group.append(node('path', { class: 'raw', d: this.path(line.x, line.y) }));
    group.append(node('path', { class: 'curve', d: this.path(line.x, line.drawn) }));
    if ((line.dots && line.x.length <= 60) || line.x.length === 1) {
      line.y.forEach((value, i) => {
        if (value !== null) group.append(
          node('circle', { cx: this.x(line.x[i]), cy: this.y(value), r: 3.2 }));
      });
    }
    for (const [step, what] of line.notFinite) {
      const cross = node('text', { x: this.x(step), y: this.box.top + 8, class: 'not-finite' }, '\u00d7');
      cross.append(node('title', {}, `step ${step}: ${this.name(line)} is ${what}`));
      group.append(cross);
    }
    this.inside.append(group);
  }

  path(x, y) {
    let pen = 'M';
    let text = '';
    for (let i = 0; i < x.length; i++) {
      if (y[i] === null) { pen = 'M'; continue; }
      text += `${pen}${this.x(x[i]).toFixed(1)} ${this.y(y[i]).toFixed(1)}`;
      pen = 'L';
    }
    return text;
  }

  band(line) {
    const floor = (value) => this.log && value <= 0 ? this.box.bottom : this.y(value);
    const known = line.x.map((step, i) => i).filter((i) => line.low[i] !== null);
    const above = known.map((i) => `${this.x(line.x[i]).toFixed(1)} ${floor(line.high[i]).toFixed(1)}`);
    const below = known.map((i) => `${this.x(line.x[i]).toFixed(1)} ${floor(line.low[i]).toFixed(1)}`);
    return known.length ? `M${above.join('L')}L${below.reverse().join('L')}Z` : '';
  }

  describe() {
    const parts = this.spec.lines.map((line) => {
      const last = line.y.length - 1;
      return `${this.name(line)} from ${formatValue(line.y[0], this.spec.unit)} at step ${line.x[0]} ` +
        `to ${formatValue(line.y[last], this.spec.unit)} at step ${line.x[last]}`;
    });
    const unit = this.spec.unit ? `, in ${this.spec.unit}` : '';
    this.svg.setAttribute('aria-label', `${this.spec.title}${unit}: ${parts.join('; ')}`);
  }

  /** What each curve reads at the cursor, or at the end. */
  readings() {
    return this.spec.lines.map((line) => {
      const i = view.cursor === null ? line.x.length - 1 : nearest(line.x, view.cursor);
      let text = formatValue(line.y[i], this.spec.unit, 5);
      if (line.low.length && line.low[i] !== null) {
        const [low, high] = [line.low[i], line.high[i]].map((v) => formatValue(v, this.spec.unit, 4));
        if (low !== high) text += ` (${low} to ${high})`;
      }
      if (line.dots && line.x[i] !== this.stepOf(line, i)) text += ` at step ${line.x[i]}`;
      return { line, i, text, label: this.name(line), colour: `c${line.colour % 6}` };
    });
  }

  /** The step that the tooltip names: that of the curve read most often. */
  stepOf() {
    const densest = this.spec.lines.reduce((a, b) => (b.x.length > a.x.length ? b : a));
    return densest.x[view.cursor === null ? densest.x.length - 1 : nearest(densest.x, view.cursor)];
  }

  stepAtCursor() {
    return this.stepOf().toLocaleString('en-US');
  }

  drawReading() {
    this.legend.replaceChildren();
    for (const { line, i, text, label, colour } of this.readings()) {
      const entry = this.legend.appendChild(html('span', `entry ${colour}${line.dashed ? ' dashed' : ''}`));
      entry.append(html('i', 'key'), html('span', '', label), html('b', '', text));
      const value = line.drawn[i];
      if (view.cursor === null || value === null || !this.overlay) continue;
      this.overlay.append(node('g', { class: colour }, node('circle', {
        cx: this.x(line.x[i]), cy: this.y(value), r: 4 })));
    }
  }
}

/** Exponential running mean, corrected for its start; gaps are passed over. */
function runningMean(values) {
  let sum = 0;
  let weight = 0;
  return values.map((value) => {
    if (value === null) return null;
    sum = view.smoothing * sum + (1 - view.smoothing) * value;
    weight = view.smoothing * weight + (1 - view.smoothing);
    return sum / weight;
  });
}

/** Round numbers in the unit that will be printed, not in bytes. */
function byteTicks(low, high, count) {
  const unit = 1024 ** binaryPower(Math.max(Math.abs(low), Math.abs(high)));
  return linearTicks(low / unit, high / unit, count).map((tick) => tick * unit);
}
