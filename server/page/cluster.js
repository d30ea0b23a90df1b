
// The cluster as /metrics says it, once a second while it is looked at.
const kPollMs = 1000, kKept = 120;
const rates = [];  // {generation, prompt} a second
let last = null, known = null, timer = null;

// name -> [{labels, value}]
function parseMetrics(text) {
  const found = new Map();
  for (const line of text.split('\n')) {
    const match = /^([a-z_:]+)(?:\{(.*)\})? (\S+)$/.exec(line);
    if (!match) continue;
    const labels = {};
    for (const [, name, value] of (match[2] || '').matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g)) labels[name] = value;
    if (!found.has(match[1])) found.set(match[1], []);
    found.get(match[1]).push({ labels, value: Number(match[3]) });
  }
  return found;
}

function total(metrics, name) {
  return (metrics.get('dovetail:' + name) || []).reduce((sum, one) => sum + one.value, 0);
}

function tell(what, bad) {
  const time = new Date().toLocaleTimeString();
  element('events').prepend(make('li', { textContent: time + '  ' + what, className: bad ? 'bad' : '' }));
  while (element('events').childElementCount > kKept) element('events').lastChild.remove();
}

function workersOf(metrics) {
  const workers = new Map();
  for (const name of ['worker_steps', 'worker_kv_blocks', 'worker_kv_blocks_in_use']) {
    for (const { labels, value } of metrics.get('dovetail:' + name) || []) {
      if (!workers.has(labels.worker)) workers.set(labels.worker, { role: labels.role, worker_steps: 0 });
      workers.get(labels.worker)[name] = value;
    }
  }
  return workers;
}

// A worker counts its steps from when it joined: one that comes back between two looks has fewer.
function noteChanges(workers) {
  if (known !== null) {
    for (const name of known.keys()) if (!workers.has(name)) tell(name + ' is gone', true);
    for (const [name, one] of workers) {
      if (!known.has(name)) tell(name + ' has joined');
      else if (one.worker_steps < known.get(name).worker_steps) tell(name + ' was lost and has joined again', true);
    }
  }
  known = workers;
}

function showWorkers(workers, seconds, before) {
  const rows = [...workers].sort().map(([name, one]) => {
    const steps = before && before.has(name) ? (one.worker_steps - before.get(name).worker_steps) / seconds : 0;
    const kv = one.worker_kv_blocks;
    const held = kv ? one.worker_kv_blocks_in_use + ' of ' + kv + ' blocks' : '';
    const gauge = kv ? make('progress', { max: kv, value: one.worker_kv_blocks_in_use }) : '';
    return make('tr', {}, make('td', { textContent: name }), make('td', { textContent: one.role }),
                make('td', { textContent: Math.max(0, steps).toFixed(1) }),
                make('td', {}, held + ' ', gauge));
  });
  element('workers').tBodies[0].replaceChildren(...rows);
}

function showNumbers(metrics, rate) {
  const numbers = [
    ['tokens/s', rate.generation.toFixed(1)], ['prompt tokens/s', rate.prompt.toFixed(1)],
    ['running', total(metrics, 'requests_running')], ['waiting', total(metrics, 'requests_waiting')],
    ['paused', total(metrics, 'requests_paused')], ['being read', total(metrics, 'requests_to_read')],
    ['KV blocks in use', total(metrics, 'kv_blocks_in_use') + ' of ' + total(metrics, 'kv_blocks_total')],
    ['preemptions', total(metrics, 'preemptions_total')],
  ];
  element('numbers').replaceChildren(...numbers.map(([name, value]) =>
    make('div', {}, make('b', { textContent: value }), make('span', { textContent: name }))));
}

function drawRates() {
  const canvas = element('rates'), style = getComputedStyle(document.documentElement);
  canvas.width = canvas.clientWidth;
  const pen = canvas.getContext('2d');
  const most = Math.max(1, ...rates.map((one) => Math.max(one.generation, one.prompt)));
  for (const [name, color] of [['prompt', '--accent'], ['generation', '--decode']]) {
    pen.strokeStyle = style.getPropertyValue(color);
    pen.lineWidth = 2;
    pen.beginPath();
    rates.forEach((one, i) => pen.lineTo(i * canvas.width / (kKept - 1), canvas.height - 4 - one[name] / most * 100));
    pen.stroke();
  }
  pen.fillStyle = style.getPropertyValue('--dim');
  pen.font = '12px sans-serif';
  pen.fillText(most.toFixed(0) + ' tok/s: decoded green, prompts blue', 6, 14);
}

function bar(parts) {
  const sum = parts.reduce((all, [, ms]) => all + ms, 0) || 1;
  return make('div', { className: 'bar' }, ...parts.filter(([, ms]) => ms > 0).map(([name, ms]) => {
    const part = make('span', { className: name, textContent: name + ' ' + Math.round(ms) + ' ms' });
    part.style.width = ms / sum * 100 + '%';
    return part;
  }));
}

function showWay(metrics) {
  const means = [['queue', 'request_queue_time_seconds'], ['prefill', 'request_prefill_time_seconds'],
                 ['decode', 'request_decode_time_seconds']].map(([name, metric]) => {
    const count = total(metrics, metric + '_count');
    return [name, count ? total(metrics, metric + '_sum') / count * 1000 : 0];
  });
  element('way').replaceChildren(bar(means));
}

function showOwn() {
  element('own').replaceChildren(...requests.map((one) => {
    const now = one.ended || performance.now();
    const box = make('div', {}, make('span', { className: 'about', textContent: one.prompt.slice(0, 60) }));
    box.append(bar([['prefill', (one.first || now) - one.sent], ['decode', one.first ? now - one.first : 0]]));
    return box;
  }));
}

async function poll() {
  try {
    const response = await api.ask('metrics');
    if (!response.ok) throw new Error(await api.failure(response));
    const metrics = parseMetrics(await response.text()), now = performance.now();
    const tokens = { generation: total(metrics, 'generation_tokens_total'),
                     prompt: total(metrics, 'prompt_tokens_total') };
    const workers = workersOf(metrics), seconds = last ? (now - last.now) / 1000 : 1;
    const rate = { generation: last ? (tokens.generation - last.tokens.generation) / seconds : 0,
                   prompt: last ? (tokens.prompt - last.tokens.prompt) / seconds : 0 };
    rates.push(rate);
    if (rates.length > kKept) rates.shift();
    showNumbers(metrics, rate);
    showWorkers(workers, seconds, last && last.workers);
    noteChanges(workers);
    showWay(metrics);
    drawRates();
    element('cluster-note').textContent = workers.size ? '' : 'One process, which is all workers.';
    last = { now, tokens, workers };
  } catch (error) {
    element('cluster-note').textContent = 'The server does not say how it is: ' + error.message;
  }
  showOwn();
}

document.addEventListener('view', (event) => {
  clearInterval(timer);
  if (event.detail !== 'cluster') return;
  poll();
  timer = setInterval(poll, kPollMs);
});
showModel();
