{{- define "dovetail.fullname" -}}
{{- default (ternary .Release.Name (printf "%s-%s" .Release.Name (default .Chart.Name .Values.nameOverride)) (contains (default .Chart.Name .Values.nameOverride) .Release.Name)) .Values.fullnameOverride | trunc 30 | trimSuffix "-" -}}
{{- end -}}

{{/* Labels by which pods are found. Takes root, component and, of workers, pool. */}}
{{- define "dovetail.selector" -}}
app.kubernetes.io/name: {{ default .root.Chart.Name .root.Values.nameOverride }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
{{- with .component }}
app.kubernetes.io/component: {{ . }}
{{- end }}
{{- with .pool }}
dovetail/pool: {{ .name }}
{{- end }}
{{- end -}}

{{- define "dovetail.labels" -}}
{{ include "dovetail.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end -}}

{{- define "dovetail.image" -}}
{{- $image := .root.Values.image -}}
{{- $gpu := and .pool (eq (dig "device" "cpu" (default dict .pool)) "gpu") -}}
{{ $image.repository }}:{{ default .root.Chart.AppVersion $image.tag }}{{ if $gpu }}{{ $image.cudaSuffix }}{{ end }}
{{- end -}}

{{- define "dovetail.tlsSecret" -}}
{{- if eq .root.Values.tls.mode "secrets" -}}
{{ get .root.Values.tls.secrets .role }}
{{- else -}}
{{ include "dovetail.fullname" .root }}-{{ .role }}-tls
{{- end -}}
{{- end -}}

{{- define "dovetail.schedulerAddress" -}}
{{ include "dovetail.fullname" . }}-scheduler:{{ .Values.network.controlPort }}
{{- end -}}

{{/* What a role shows on the control plane: flags of one line each. */}}
{{- define "dovetail.securityArgs" -}}
{{- if ne .Values.tls.mode "none" }}
- --tls-cert=/etc/dovetail/tls/tls.crt
- --tls-key=/etc/dovetail/tls/tls.key
- --tls-ca=/etc/dovetail/tls/ca.crt
{{- end }}
{{- if .Values.joinToken.existingSecret }}
- --join-token-file=/etc/dovetail/join/token
{{- end }}
{{- end -}}

{{- define "dovetail.dataArgs" -}}
- --lanes={{ ternary "rc" "tcp" .Values.rdma.enabled }}
{{- if not .Values.rdma.enabled }}
- --data-ports={{ .Values.network.dataPorts.first }}-{{ .Values.network.dataPorts.last }}
{{- end }}
{{- with .Values.network.dataDevices }}
- --data-devices={{ . }}
{{- end }}
{{- if eq .Values.tls.mode "none" }}
- --trust-network
{{- end }}
{{- end -}}

{{/* The same for an operator's commands in a shell: probes and preStop. */}}
{{- define "dovetail.operatorFlags" -}}
--scheduler {{ include "dovetail.schedulerAddress" . }}
{{- if ne .Values.tls.mode "none" }} --tls-cert /etc/dovetail/operator/tls.crt --tls-key /etc/dovetail/operator/tls.key --tls-ca /etc/dovetail/operator/ca.crt{{ end }}
{{- if .Values.joinToken.existingSecret }} --join-token-file /etc/dovetail/join/token{{ end }}
{{- end -}}

{{/* Seconds that the largest attention worker's KV takes over the network. */}}
{{- define "dovetail.moveSeconds" -}}
{{- $most := 1 -}}
{{- range .Values.attention.pools -}}
{{- $most = max $most (int (default 80 .kvCapacityGiB)) -}}
{{- end -}}
{{ add 10 (div (mul $most 859) (mul 100 (int .Values.drain.gbitPerSecond))) }}
{{- end -}}

{{/* Seconds that an attention worker has to drain: for one pool after the other, as one worker drains at a time. Within
a pool minReadySeconds keeps the next from being stopped before. */}}
{{- define "dovetail.drainSeconds" -}}
{{ mul (len .Values.attention.pools) (add (int (include "dovetail.moveSeconds" .)) (int .Values.drain.longestRequestSeconds)) }}
{{- end -}}

{{- define "dovetail.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{/* Takes root and rdma: whether this container locks memory. */}}
{{- define "dovetail.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
  {{- if and .rdma .root.Values.rdma.enabled }}
  add: [IPC_LOCK]
  {{- end }}
{{- end -}}

{{- define "dovetail.priority" -}}
{{- $given := get .root.Values.priorityClasses.names .component -}}
{{- if $given -}}
priorityClassName: {{ $given }}
{{- else if .root.Values.priorityClasses.create -}}
priorityClassName: {{ include "dovetail.fullname" .root }}-{{ .component }}
{{- end -}}
{{- end -}}

{{/* What every pod has in common. Takes root, component, settings (nodes), and pool or nothing. */}}
{{- define "dovetail.podCommon" -}}
{{- $root := .root -}}
serviceAccountName: {{ include "dovetail.fullname" $root }}
automountServiceAccountToken: false
enableServiceLinks: false
{{- with include "dovetail.priority" . }}
{{ . }}
{{- end }}
{{- if and $root.Values.rdma.enabled $root.Values.rdma.hostNetwork (ne .component "server") }}
hostNetwork: true
dnsPolicy: ClusterFirstWithHostNet
{{- end }}
securityContext:
  {{- include "dovetail.podSecurity" $root | nindent 2 }}
{{- with $root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .settings.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .settings.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .settings.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
topologySpreadConstraints:
  {{- range $key := list "topology.kubernetes.io/zone" "kubernetes.io/hostname" }}
  - maxSkew: 1
    topologyKey: {{ $key }}
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "dovetail.selector" $ | nindent 8 }}
  {{- end }}
{{- end -}}

{{- define "dovetail.podMeta" -}}
labels:
  {{- include "dovetail.labels" . | nindent 2 }}
  {{- with .root.Values.podLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with .root.Values.podAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "dovetail.env" -}}
- name: POD_NAME
  valueFrom:
    fieldRef:
      fieldPath: metadata.name
- name: POD_IP
  valueFrom:
    fieldRef:
      fieldPath: status.podIP
{{- end -}}

{{/* Mounts and volumes of secrets. Takes root, role, and operator: whether probes or preStop need its certificate. */}}
{{- define "dovetail.secretMounts" -}}
- name: tmp
  mountPath: /tmp
{{- if ne .root.Values.tls.mode "none" }}
- name: tls
  mountPath: /etc/dovetail/tls
  readOnly: true
{{- if .operator }}
- name: operator
  mountPath: /etc/dovetail/operator
  readOnly: true
{{- end }}
{{- end }}
{{- if .root.Values.joinToken.existingSecret }}
- name: join
  mountPath: /etc/dovetail/join
  readOnly: true
{{- end }}
{{- end -}}

{{- define "dovetail.secretVolumes" -}}
- name: tmp
  emptyDir:
    sizeLimit: 1Gi
{{- if ne .root.Values.tls.mode "none" }}
- name: tls
  secret:
    secretName: {{ include "dovetail.tlsSecret" . }}
    defaultMode: 0400
{{- if .operator }}
- name: operator
  secret:
    secretName: {{ include "dovetail.tlsSecret" (dict "root" .root "role" "operator") }}
    defaultMode: 0400
{{- end }}
{{- end }}
{{- with .root.Values.joinToken.existingSecret }}
- name: join
  secret:
    secretName: {{ . }}
    defaultMode: 0400
{{- end }}
{{- end -}}
