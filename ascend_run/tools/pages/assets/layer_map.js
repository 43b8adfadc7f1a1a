// The share of its layer's tokens that each expert took, at the step of the cursor: a row a layer, a
// column an expert.

class LayerMap {
  constructor(host, spec, title) {
    this.host = host;
    this.spec = spec;
    this.title = title;
    this.rows = spec.layers.length;
    this.columns = Math.max(...spec.shares[0].map((layer) => layer.length));
    this.row = Math.max(5, Math.min(22, Math.floor(480 / this.rows)));
    this.legend = host.appendChild(html('div', 'legend'));
    this.svg = host.appendChild(node('svg', { role: 'img' }));
    this.reading = this.legend.appendChild(html('span', 'entry'));
    view.plots.push(this);
  }

  period() {
    const { edges, shares } = this.spec;
    if (view.cursor === null) return shares.length - 1;
    const after = edges.findIndex((edge) => edge > view.cursor);
    return after < 0 ? shares.length - 1 : Math.max(0, after - 1);
  }

  draw() {
    this.shown = undefined;
    this.drawCursor();
  }

  drawCursor() {
    const period = this.period();
    if (period === this.shown) return;
    this.shown = period;
    const width = Math.max(200, this.host.clientWidth);
    const left = 66;
    const cell = (width - 14 - left) / this.columns;
    const height = this.rows * this.row + 34;
    this.svg.setAttribute('viewBox', `0 0 ${width} ${height}`);
    this.svg.setAttribute('height', height);
    const paths = new Array(LOAD_CLASSES.length + 1).fill('');
    let most = { relative: 0 };
    this.spec.shares[period].forEach((layer, i) => layer.forEach((share, expert) => {
      const relative = share * layer.length;
      if (relative > most.relative) most = { relative, expert, layer: this.spec.layers[i] };
      paths[loadClass(relative)] += `M${(left + cell * expert).toFixed(1)} ${10 + this.row * i}` +
        `h${(cell + 0.2).toFixed(1)}v${this.row - (this.row > 8 ? 1 : 0)}h${(-cell - 0.2).toFixed(1)}z`;
    }));
    this.svg.replaceChildren(...paths.flatMap(
      (d, i) => (d ? [node('path', { d, class: `load${i}` })] : [])), this.axes(left, cell, height));
    const step = this.spec.edges[period].toLocaleString('en-US');
    const text = `step ${step}: expert ${most.expert} of layer ${most.layer} at ` +
      `${formatValue(most.relative, '', 3)} times its balanced share`;
    this.reading.textContent = text;
    this.svg.setAttribute('aria-label', `${this.title}, ${text}`);
  }

  axes(left, cell, height) {
    const axes = node('g', { class: 'axes', 'aria-hidden': 'true' });
    const every = Math.ceil(14 / this.row);
    for (let i = 0; i < this.rows; i += every) {
      axes.append(node('text', { x: left - 8, y: 10 + this.row * (i + 0.5) + 4, 'text-anchor': 'end' },
        `layer ${this.spec.layers[i]}`));
    }
    const apart = Math.ceil(60 / cell);
    for (let expert = 0; expert < this.columns; expert += apart) {
      axes.append(node('text', { x: left + cell * (expert + 0.5), y: height - 6, 'text-anchor': 'middle' },
        expert));
    }
    axes.append(node('text', { x: left - 8, y: height - 6, 'text-anchor': 'end' }, 'expert'));
    return axes;
  }
}
