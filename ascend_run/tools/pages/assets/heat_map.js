// The share of the tokens that each expert took: a row an expert, a column a span of steps.

/** Class borders in powers of two around balance. */
const LOAD_CLASSES = [-1.5, -1, -0.6, -0.3, -0.1, 0.1, 0.3, 0.6, 1, 1.5];

class HeatMap extends Plot {
  constructor(host, spec, title) {
    const experts = spec.shares[0].length;
    const row = Math.max(3, Math.min(22, Math.floor(360 / experts)));
    super(host, [spec.edges[0], spec.edges[spec.edges.length - 1]], 34 + row * experts);
    this.spec = spec;
    this.experts = experts;
    this.title = title;
    this.key();
  }

  domain() {
    return [0, this.experts];
  }

  vertical() {
    return linearScale(0, this.experts, this.box.top, this.box.bottom);
  }

  labels() {
    const every = Math.ceil(this.experts * 14 / (this.height - 34));
    const labels = [];
    for (let expert = 0; expert < this.experts; expert += every) {
      labels.push([expert + 0.5, `expert ${expert}`]);
    }
    return labels;
  }

  drawInside() {
    const paths = new Array(LOAD_CLASSES.length + 1).fill('');
    this.spec.shares.forEach((column, i) => {
      const left = this.x(this.spec.edges[i]);
      const width = this.x(this.spec.edges[i + 1]) - left;
      column.forEach((share, expert) => {
        const top = this.y(expert);
        const height = this.y(expert + 1) - top;
        const gap = height > 8 ? 1 : 0;
        paths[loadClass(share * this.experts)] +=
          `M${left.toFixed(1)} ${top.toFixed(1)}h${(width + 0.2).toFixed(1)}` +
          `v${(height - gap).toFixed(1)}h${(-width - 0.2).toFixed(1)}z`;
      });
    });
    paths.forEach((d, i) => { if (d) this.inside.append(node('path', { d, class: `load${i}` })); });
    const last = this.spec.shares[this.spec.shares.length - 1];
    this.svg.setAttribute('aria-label', `${this.title}: at the end the busiest expert takes ` +
      `${formatValue(100 * Math.max(...last), '', 3)} % of the tokens, the idlest ` +
      `${formatValue(100 * Math.min(...last), '', 3)} %`);
  }

  column() {
    if (view.cursor === null) return this.spec.shares.length - 1;
    const after = this.spec.edges.findIndex((edge) => edge > view.cursor);
    return after < 0 ? this.spec.shares.length - 1 : Math.max(0, after - 1);
  }

  stepAtCursor() {
    return this.spec.edges[this.column()].toLocaleString('en-US');
  }

  /** The busiest and the idlest where there are many. */
  readings() {
    const shares = this.spec.shares[this.column()].map((share, expert) => ({ share, expert }));
    const sorted = [...shares].sort((a, b) => b.share - a.share);
    const chosen = shares.length <= 10 ? shares : [...sorted.slice(0, 4), ...sorted.slice(-4)];
    return chosen.map(({ share, expert }) => ({
      label: `expert ${expert}`,
      text: `${formatValue(100 * share, '', 3)} %`,
      colour: `load-key${loadClass(share * this.experts)}`,
    }));
  }

  drawReading() {
    const shares = this.spec.shares[this.column()];
    const most = Math.max(...shares) * this.experts;
    this.reading.textContent = `busiest expert at ${formatValue(most, '', 3)} times its balanced share`;
  }

  key() {
    const key = this.legend.appendChild(html('span', 'load-legend'));
    key.append(html('span', '', '\u2264 0.35'));
    for (let i = 0; i <= LOAD_CLASSES.length; i++) key.append(html('i', `load-key${i}`));
    key.append(html('span', '', '\u2265 2.8 times its balanced share'));
    this.reading = this.legend.appendChild(html('span', 'entry'));
  }
}

function loadClass(relative) {
  const power = Math.log2(Math.max(relative, 1e-9));
  const above = LOAD_CLASSES.findIndex((border) => power < border);
  return above < 0 ? LOAD_CLASSES.length : above;
}
