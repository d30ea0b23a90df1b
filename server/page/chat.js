
// The conversation. `turns` is what the next request sends.
const turns = [];
const requests = [];  // this page's, for the view of the cluster: {prompt, sent, first, last, ended, tokens}
let running = null;   // an AbortController
const kOwnRequests = 20;

function addMessage(role, text) {
  const box = make('div', { className: 'message ' + role });
  box.append(make('div', { className: 'who', textContent: role }), make('div', { className: 'text' }, text));
  element('log').append(box);
  box.scrollIntoView({ block: 'end' });
  return box;
}

function numberOf(id) {
  const text = element(id).value.trim();
  return text === '' ? undefined : Number(text);
}

function bodyOfRequest() {
  const system = element('system').value.trim(), tools = element('tools').value.trim();
  return {
    model, stream: true, stream_options: { include_usage: true },
    messages: (system ? [{ role: 'system', content: system }] : []).concat(turns),
    temperature: numberOf('temperature'), top_p: numberOf('top-p'), max_tokens: numberOf('max-tokens'),
    seed: numberOf('seed'), tools: tools ? JSON.parse(tools) : undefined,
  };
}

// Yields the JSON of each event.
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = '';
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split('\n\n');
    rest = parts.pop();
    for (const part of parts) {
      if (part.startsWith('data: ') && part !== 'data: [DONE]') yield JSON.parse(part.slice(6));
    }
  }
}

function addDelta(answer, delta) {
  answer.content += delta.content || '';
  answer.reasoning += delta.reasoning_content || '';
  for (const call of delta.tool_calls || []) {
    const held = answer.calls[call.index] ||= { id: call.id, type: 'function', function: { name: '', arguments: '' } };
    held.function.name += call.function.name || '';
    held.function.arguments += call.function.arguments || '';
  }
}

function about(answer, record) {
  const parts = [];
  if (record.first) parts.push('first token after ' + Math.round(record.first - record.sent) + ' ms');
  if (answer.usage) parts.push(answer.usage.prompt_tokens + ' + ' + answer.usage.completion_tokens + ' tokens');
  const seconds = (record.last - record.first) / 1000;
  if (seconds > 0 && record.tokens > 1) parts.push(((record.tokens - 1) / seconds).toFixed(1) + ' tok/s');
  if (answer.finish) parts.push(answer.finish);
  return parts.join(' · ');
}

function showAnswer(box, answer, record) {
  const text = box.querySelector('.text');
  text.replaceChildren();
  if (answer.reasoning) {
    const thought = make('details', { className: 'thought', open: !answer.content });
    thought.append(make('summary', { textContent: 'Thoughts' }), make('div', { textContent: answer.reasoning }));
    text.append(thought);
  }
  text.append(markdown.render(answer.content));
  for (const call of answer.calls) {
    const shown = make('div', { className: 'call' });
    shown.append('Calls ', make('code', { textContent: call.function.name }),
                 make('pre', {}, make('code', { textContent: call.function.arguments })));
    text.append(shown);
  }
  let line = box.querySelector('.about');
  if (!line) box.append(line = make('div', { className: 'about' }));
  line.textContent = about(answer, record);
}

// A field for the result of each call; the last one sends them all.
function askForResults(box, calls) {
  const form = make('form'), fields = [];
  for (const call of calls) {
    const field = make('textarea', { rows: 2, required: true });
    fields.push(field);
    form.append(make('label', {}, 'Result of ' + call.function.name, field));
  }
  form.append(make('button', { textContent: 'Send results' }));
  form.addEventListener('submit', (event) => {
    event.preventDefault();
    calls.forEach((call, i) => turns.push({ role: 'tool', tool_call_id: call.id, content: fields[i].value }));
    form.remove();
    answerHistory();
  });
  box.append(form);
}

function setRunning(controller) {
  running = controller;
  element('send').disabled = controller !== null;
  element('stop').disabled = controller === null;
  element('again').disabled = controller !== null || !turns.some((one) => one.role === 'assistant');
}

function keep(answer) {
  const message = { role: 'assistant', content: answer.content };
  if (answer.calls.length) message.tool_calls = answer.calls;
  if (answer.content || answer.calls.length) turns.push(message);
}

async function receive(box, answer, record, signal) {
  const body = JSON.stringify(bodyOfRequest());
  const response = await api.ask('v1/chat/completions',
    { method: 'POST', body, signal, headers: { 'Content-Type': 'application/json' } });
  if (!response.ok) throw new Error(await api.failure(response));
  for await (const event of events(response)) {
    if (event.error) throw new Error(event.error.message);
    if (event.usage) answer.usage = event.usage;
    const choice = event.choices[0];
    if (choice) {
      const delta = choice.delta;
      addDelta(answer, delta);
      if (choice.finish_reason) answer.finish = choice.finish_reason;
      if (delta.content || delta.reasoning_content || delta.tool_calls) {
        record.first ||= performance.now();
        record.last = performance.now();
        record.tokens += 1;
      }
    }
    if (answer.usage) record.tokens = answer.usage.completion_tokens;
    showAnswer(box, answer, record);
  }
}

async function answerHistory() {
  const controller = new AbortController();
  setRunning(controller);
  const answer = { content: '', reasoning: '', calls: [], finish: null, usage: null };
  const record = { prompt: turns[turns.length - 1].content, sent: performance.now(), first: 0, last: 0, ended: 0,
                   tokens: 0 };
  requests.unshift(record);
  requests.length = Math.min(requests.length, kOwnRequests);
  const box = addMessage('assistant', '…');
  try {
    await receive(box, answer, record, controller.signal);
  } catch (error) {
    answer.finish = controller.signal.aborted ? 'stopped' : 'failed';
    showAnswer(box, answer, record);
    if (!controller.signal.aborted) {
      box.classList.add('failed');
      box.querySelector('.text').append(make('p', { textContent: error.message }));
    }
  }
  record.ended = performance.now();
  keep(answer);
  setRunning(null);
  const whole = answer.finish !== 'stopped' && answer.finish !== 'failed';
  if (answer.calls.length && whole) askForResults(box, answer.calls);
  else element('prompt').focus();
}

function send() {
  const text = element('prompt').value.trim();
  if (!text || running) return;
  element('prompt').value = '';
  turns.push({ role: 'user', content: text });
  addMessage('user', text);
  answerHistory();
}

element('ask').addEventListener('submit', (event) => { event.preventDefault(); send(); });
element('prompt').addEventListener('keydown', (event) => {
  if (event.key !== 'Enter' || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
document.addEventListener('keydown', (event) => { if (event.key === 'Escape' && running) running.abort(); });
element('stop').addEventListener('click', () => running && running.abort());
element('again').addEventListener('click', () => {
  while (turns.length && turns[turns.length - 1].role !== 'assistant') turns.pop();
  turns.pop();
  const boxes = element('log').querySelectorAll('.message.assistant');
  boxes[boxes.length - 1].remove();
  answerHistory();
});
element('clear').addEventListener('click', () => {
  if (running) running.abort();
  turns.length = 0;
  element('log').replaceChildren();
  element('again').disabled = true;
});
