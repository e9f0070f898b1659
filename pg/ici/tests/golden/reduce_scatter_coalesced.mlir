module @reduce_scatter attributes {mhlo.num_partitions = 1 : i32, mhlo.num_replicas = 2 : i32} {
  func.func public @main(%arg0: tensor<2x8x128xf32>, %arg1: tensor<2x8x128xi64>) -> (tensor<1x8x128xf32>, tensor<1x8x128xi64>) {
    %0 = "stablehlo.reduce_scatter"(%arg0) ({
    ^bb0(%a: tensor<f32>, %b: tensor<f32>):
      %c = stablehlo.add %a, %b : tensor<f32>
      stablehlo.return %c : tensor<f32>
    }) {scatter_dimension = 0 : i64, replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>} : (tensor<2x8x128xf32>) -> tensor<1x8x128xf32>
    %1 = "stablehlo.reduce_scatter"(%arg1) ({
    ^bb0(%a: tensor<i64>, %b: tensor<i64>):
      %c = stablehlo.maximum %a, %b : tensor<i64>
      stablehlo.return %c : tensor<i64>
    }) {scatter_dimension = 0 : i64, replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>} : (tensor<2x8x128xi64>) -> tensor<1x8x128xi64>
    return %0, %1 : tensor<1x8x128xf32>, tensor<1x8x128xi64>
  }
}
