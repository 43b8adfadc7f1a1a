// Puts the plots into the page and the controls to work.

const data = JSON.parse(document.getElementById('report-data').textContent);

function all(selector, within = document) {
  return [...within.querySelectorAll(selector)];
}

function addPlots() {
  for (const host of all('[data-chart]')) {
    const spec = data.charts[host.dataset.chart];
    const chart = new LineChart(host, spec, data.runs, data.runs.length > 1 ? [] : data.marks);
    const button = host.closest('figure').querySelector('button.log');
    button.disabled = !chart.canBeLog;
    button.setAttribute('aria-label', `${spec.title}: logarithmic axis`);
    button.addEventListener('click', () => {
      chart.log = toggle(button);
      chart.draw();
    });
  }
  for (const host of all('[data-heat]')) {
    new HeatMap(host, data.heats[host.dataset.heat], host.closest('figure').querySelector('h3').textContent);
  }
  for (const host of all('[data-layers]')) {
    new LayerMap(host, data.layers[host.dataset.layers], host.closest('figure').querySelector('h3').textContent);
  }
}

function toggle(button) {
  const pressed = button.getAttribute('aria-pressed') !== 'true';
  button.setAttribute('aria-pressed', pressed);
  return pressed;
}

function drawAll() {
  for (const plot of view.plots) plot.draw();
}

function listenToCurveControls() {
  const slider = document.getElementById('smoothing');
  if (!slider) return;
  const smooth = () => {
    view.smoothing = slider.value / 100;
    document.getElementById('smoothing-value').textContent = view.smoothing.toFixed(2);
    for (const plot of view.plots) plot.smooth?.();
  };
  slider.addEventListener('input', () => { smooth(); drawAll(); });
  document.getElementById('zoom-out').addEventListener('click', () => setRange(null));
  smooth();
  let width = 0;
  new ResizeObserver(() => {
    if (width === document.body.clientWidth) return;
    width = document.body.clientWidth;
    drawAll();
  }).observe(document.body);
  addEventListener('beforeprint', drawAll);
}

/** One plugin at a time is picked out in the drawing of its run. */
function listenToPlugins() {
  for (const section of all('section[id^="plan-"]')) {
    const pick = (name) => {
      section.classList.toggle('picking', name !== null);
      for (const box of all('[data-plugin]', section)) {
        box.classList.toggle('picked', box.dataset.plugin === name);
      }
    };
    let held = null;
    for (const button of all('.plugins button', section)) {
      const name = button.dataset.plugin;
      button.addEventListener('mouseenter', () => pick(name));
      button.addEventListener('mouseleave', () => pick(held));
      button.addEventListener('click', () => {
        held = held === name ? null : name;
        for (const other of all('.plugins button', section)) {
          other.setAttribute('aria-pressed', other.dataset.plugin === held);
        }
        pick(held);
      });
    }
  }
}

function listenToRanks() {
  for (const grid of all('[data-run]')) {
    const groups = data.groups[grid.dataset.run];
    const buttons = all('[data-group]', grid);
    const colour = (name) => {
      for (const button of buttons) button.setAttribute('aria-pressed', button.dataset.group === name);
      for (const cell of all('[data-rank]', grid)) {
        const index = groups[name]?.[cell.dataset.rank];
        cell.className = index === undefined ? '' : `p${index % 6}`;
        cell.querySelector('.group').textContent = index === undefined ? '' : `${name} group ${index}`;
      }
    };
    for (const button of buttons) {
      button.addEventListener('click', () => {
        colour(button.getAttribute('aria-pressed') === 'true' ? null : button.dataset.group);
      });
    }
    if (buttons.length) colour(buttons[0].dataset.group);
  }
}

function listenToConfig() {
  for (const section of all('section[id^="config-"]')) {
    const search = section.querySelector('.config-search');
    const onlySet = section.querySelector('.config-set');
    const rows = all('tbody tr', section);
    const filter = () => {
      const words = search.value.toLowerCase().split(/\s+/);
      let shown = 0;
      for (const row of rows) {
        const text = row.textContent.toLowerCase();
        const fits = words.every((word) => text.includes(word));
        row.hidden = !fits || (onlySet.checked && row.dataset.set === 'no');
        if (!row.hidden) shown += 1;
      }
      section.querySelector('.config-count').textContent = `${shown} of ${rows.length} keys`;
    };
    search.addEventListener('input', filter);
    onlySet.addEventListener('change', filter);
  }
}

document.documentElement.classList.add('scripted');
addPlots();
listenToCurveControls();
listenToPlugins();
listenToRanks();
listenToConfig();
