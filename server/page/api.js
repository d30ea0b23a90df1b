
'use strict';
// The API, and the key that it may ask for. The key stays in this tab.
const element = (id) => document.getElementById(id);

function make(name, properties = {}, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

const api = {
  key: sessionStorage.getItem('key') || '',
  headers(more = {}) { return this.key ? { Authorization: 'Bearer ' + this.key, ...more } : more; },
  async ask(path, options = {}) {
    const response = await fetch(path, { ...options, headers: this.headers(options.headers) });
    if (response.status === 401) this.needKey(path);
    return response;
  },
  async failure(response) {
    try { return (await response.json()).error.message; } catch { return 'status ' + response.status; }
  },
  needKey(path) {
    element('key-form').hidden = false;
    element('key-note').textContent = this.key ? 'The key was not accepted for ' + path + '.' : '';
  },
};

element('key-form').addEventListener('submit', (event) => {
  event.preventDefault();
  api.key = element('key').value.trim();
  sessionStorage.setItem('key', api.key);
  element('key-form').hidden = true;
  showModel();
});

let model = null;
async function showModel() {
  const response = await api.ask('v1/models');
  if (response.ok) model = (await response.json()).data[0].id;
  element('model').textContent = response.ok ? model : await api.failure(response);
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  localStorage.setItem('theme', theme);
}
element('theme').addEventListener('click', () =>
  setTheme(document.documentElement.dataset.theme === 'dark' ? 'light' : 'dark'));
setTheme(localStorage.getItem('theme') || (matchMedia('(prefers-color-scheme: dark)').matches ? 'dark' : 'light'));

const kViews = ['chat', 'cluster', 'docs'];
function showView(name) {
  for (const view of kViews) {
    element(view).hidden = view !== name;
    element('tab-' + view).setAttribute('aria-selected', String(view === name));
  }
  document.dispatchEvent(new CustomEvent('view', { detail: name }));
}
for (const name of kViews) element('tab-' + name).addEventListener('click', () => showView(name));
